#include "parvl/comm/transfer/transfer_source.h"

#include <chrono>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/base/checksum.h"
#include "parvl/base/text.h"
#include "parvl/comm/transfer/transfer_server.h"

namespace parvl {
namespace {

constexpr size_t kMaxInstanceBytes = 64;
constexpr size_t kMinTokenBytes = 16;

absl::Status check(const TransferSourceOptions& options) {
  if (options.name.empty() || options.name.size() > kMaxInstanceBytes) {
    return invalid("a transfer source's name has 1 to ", kMaxInstanceBytes, " bytes, not ", options.name.size());
  }
  if (options.token.size() < kMinTokenBytes || options.token.size() > kMaxTransferTokenBytes) {
    return invalid("a transfer's token has ", kMinTokenBytes, " to ", kMaxTransferTokenBytes, " bytes, not ",
                   options.token.size());
  }
  PARVL_CHECK(options.clock != nullptr, "a transfer source needs a clock");
  if (options.arena_bytes < 1 || options.arena_bytes > kMaxTransferBytes || options.max_items < 1 ||
      options.max_connections < 1 || options.max_credit_bytes < 1 || options.silence_s <= 0) {
    return invalid("the limits of the transfer source ", options.name, " must be above 0");
  }
  const std::string host = options.tcp_listen.substr(0, options.tcp_listen.rfind(':'));
  if (options.tcp_host.empty() && (host == "0.0.0.0" || host == "[::]")) {
    return invalid("the transfer source ", options.name, " listens at ", host,
                   ", which others cannot reach: tcp_host must say by which address they can");
  }
  return absl::OkStatus();
}

}  // namespace

TransferRegion::~TransferRegion() { give_back(); }

TransferRegion& TransferRegion::operator=(TransferRegion&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  state_ = std::move(other.state_);
  item_ = other.item_;
  slab_ = other.slab_;
  memory_ = std::move(other.memory_);
  tensors_ = std::move(other.tensors_);
  return *this;
}

void TransferRegion::give_back() {
  if (!state_) return;
  std::lock_guard lock(state_->mutex);
  state_->ledger.cancel(item_);
  state_->changed();
}

absl::StatusOr<std::unique_ptr<TransferSource>> TransferSource::start(const TransferSourceOptions& options) {
  PARVL_RETURN_IF_ERROR(check(options));
  std::unique_ptr<TransferSource> out(new TransferSource(std::make_shared<TransferSourceState>(options)));
  PARVL_ASSIGN_OR_RETURN(out->server_, TransferServer::start(out->state_));
  return out;
}

TransferSource::TransferSource(std::shared_ptr<TransferSourceState> state) : state_(std::move(state)) {}
TransferSource::~TransferSource() = default;

absl::StatusOr<TransferRegion> TransferSource::reserve(std::vector<TransferTensor> tensors, double wait_s) {
  PARVL_ASSIGN_OR_RETURN(const int64_t bytes, place_tensors(tensors));
  TransferRegion out;
  std::unique_lock lock(state_->mutex);
  absl::StatusOr<TransferId> item = state_->ledger.reserve(bytes);
  if (!item.ok() && wait_s > 0) {
    state_->room.wait_for(lock, std::chrono::duration<double>(wait_s), [&] {
      if (!absl::IsResourceExhausted(item.status())) return true;
      item = state_->ledger.reserve(bytes);
      return item.ok() || state_->stopping;
    });
  }
  if (!item.ok()) {
    state_->starved |= absl::IsResourceExhausted(item.status());
    return item.status();
  }
  const TransferLedger::Memory& memory = state_->ledger.memory(*item);
  out.slab_ = memory.slab;
  out.memory_ = memory.memory;
  out.item_ = *item;
  out.tensors_ = std::move(tensors);
  out.state_ = state_;
  return out;
}

absl::StatusOr<FileDescriptor> TransferRegion::open_to_write() const { return memory_->open_to_write(); }

TransferHandle TransferSource::publish(TransferRegion region, const TransferLease& lease) {
  uint64_t checksum = 0;
  for (size_t i = 0; i < region.tensors_.size(); ++i) {
    checksum = tensor_checksum(region.data(i), static_cast<size_t>(region.tensors_[i].bytes), checksum);
  }
  return publish(std::move(region), lease, checksum);
}

TransferHandle TransferSource::publish(TransferRegion region, const TransferLease& lease, uint64_t checksum) {
  PARVL_CHECK(region.state_ == state_, "a region of another source, or an empty one");
  auto content = std::make_shared<TransferContent>();
  TransferHandle out;
  for (const TransferTensor& tensor : region.tensors_) {
    content->parts.push_back({tensor.offset, tensor.bytes});
    content->payload_bytes += tensor.bytes;
  }
  out.checksum = checksum;
  out.source = state_->options.name;
  out.epoch = state_->options.epoch;
  out.item = region.item_;
  out.host = state_->host;
  out.local_address = state_->local_address;
  out.tcp_address = state_->tcp_address;
  out.slab = region.slab_;
  out.tensors = std::move(region.tensors_);
  const int64_t lease_end = deadline_after(*state_->options.clock, lease.seconds).end_ns;
  region.state_.reset();
  std::lock_guard lock(state_->mutex);
  state_->ledger.publish(out.item, std::move(content), lease_end, lease.pulls);
  state_->changed();
  return out;
}

bool TransferSource::drop(TransferId item) {
  std::lock_guard lock(state_->mutex);
  const bool was_there = state_->ledger.drop(item, state_->options.clock->now_ns());
  state_->changed();
  return was_there;
}

int64_t TransferSource::fence(const std::string& reader, int64_t epoch) {
  std::lock_guard lock(state_->mutex);
  const std::vector<ReaderId> cut = state_->ledger.fence(reader, epoch);
  state_->to_close.insert(state_->to_close.end(), cut.begin(), cut.end());
  state_->changed();
  return static_cast<int64_t>(cut.size());
}

TransferSourceCounters TransferSource::counters() const {
  std::lock_guard lock(state_->mutex);
  return state_->ledger.counters();
}

}  // namespace parvl
