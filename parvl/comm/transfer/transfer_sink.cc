#include "parvl/comm/transfer/transfer_sink.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/base/checksum.h"
#include "parvl/base/text.h"
#include "parvl/comm/transfer/transfer_link.h"

namespace parvl {
namespace {

using Outputs = absl::Span<const absl::Span<std::byte>>;

constexpr size_t kAlignment = 64;

// What a source has answered to a Pull.
struct Pulled {
  TransferPeers::Key key;
  std::shared_ptr<TransferLink> link;
  TransferAnswer answer;
  std::shared_ptr<SharedSlab> mapping;  // of shared memory
};

absl::Status damaged(const TransferHandle& handle, const std::string& what) {
  return absl::DataLossError(absl::StrCat("item ", handle.item.value, " of ", handle.source, ": ", what));
}

TransferPeers::Key key_of(const TransferHandle& handle, TransferLane lane) {
  const bool local = lane == TransferLane::kSharedMemory;
  return {lane, local ? handle.local_address : handle.tcp_address, handle.source, handle.epoch};
}

// One question over one connection.
absl::Status ask(const TransferHandle& handle, int64_t credit, const Deadline& deadline, TransferPeers& peers,
                 Pulled& out) {
  const bool local = out.key.lane == TransferLane::kSharedMemory;
  if (local) out.mapping = peers.find_mapping(out.key, handle.slab);
  const TransferPull pull{handle.item, out.mapping == nullptr, credit};
  PARVL_RETURN_IF_ERROR(out.link->send(pull, deadline));
  FileDescriptor descriptor;
  PARVL_ASSIGN_OR_RETURN(out.answer, out.link->receive_answer(deadline, &descriptor));
  if (out.answer.code != absl::StatusCode::kOk) {
    peers.give_back(out.key, std::move(out.link));
    return absl::Status(out.answer.code, out.answer.message);
  }
  if (!local) return absl::OkStatus();
  ++out.link->holds;
  const bool agrees = out.answer.slab == handle.slab && out.answer.payload_bytes == handle.payload_bytes() &&
                      out.answer.slab_bytes >= handle.extent_bytes();
  absl::Status status = agrees ? absl::OkStatus() : damaged(handle, "the source has another item under this number");
  if (status.ok() && !out.mapping) {
    absl::StatusOr<std::unique_ptr<SharedSlab>> mapped = SharedSlab::map(descriptor, out.answer.slab_bytes);
    status = mapped.status();
    if (mapped.ok()) {
      out.mapping = std::move(*mapped);
      peers.keep_mapping(out.key, handle.slab, out.mapping);
    }
  }
  if (!status.ok()) {
    --out.link->holds;
    out.link->release(handle.item, false);
  }
  return status;
}

// A connection that was kept may have ended meanwhile, which says nothing about the source; then a new one is tried.
absl::StatusOr<Pulled> ask_by(TransferLane lane, const TransferHandle& handle, int64_t credit, const Deadline& deadline,
                              TransferPeers& peers) {
  Pulled out;
  out.key = key_of(handle, lane);
  for (const bool fresh : {false, true}) {
    PARVL_ASSIGN_OR_RETURN(TransferPeers::Lease lease, peers.take(out.key, fresh, deadline));
    out.link = lease.link;
    const absl::Status status = ask(handle, credit, deadline, peers, out);
    if (status.ok()) return out;
    if (!absl::IsUnavailable(status) || lease.is_new) return status;
  }
  return absl::UnavailableError("the source has closed the connection");
}

std::vector<TransferLane> lanes_of(const TransferHandle& handle, const TransferSinkOptions& options,
                                   const std::string& host) {
  const bool near = !host.empty() && host == handle.host && !handle.local_address.empty();
  std::vector<TransferLane> out;
  if (near) out.push_back(TransferLane::kSharedMemory);
  if (!handle.tcp_address.empty()) out.push_back(TransferLane::kTcp);
  std::erase_if(out, [&options](TransferLane lane) { return options.only && lane != *options.only; });
  return out;
}

// Takes the tensors' bytes off a TCP connection, giving credit as they are taken.
class Receiver {
 public:
  Receiver(TransferLink& link, const Deadline& deadline, int64_t credit, int64_t payload)
      : link_(link), deadline_(deadline), credit_(credit), payload_(payload), granted_(std::min(credit, payload)) {}

  absl::Status receive(absl::Span<std::byte> out) {
    for (size_t done = 0; done < out.size(); done += kChecksumPiece) {
      const auto piece = out.subspan(done, kChecksumPiece);
      PARVL_RETURN_IF_ERROR(receive_piece(piece));
      checksum_ = piece_checksum(piece.data(), piece.size(), checksum_);
    }
    return absl::OkStatus();
  }
  uint64_t checksum() const { return checksum_; }

 private:
  absl::Status receive_piece(absl::Span<std::byte> piece) {
    for (size_t done = 0; done < piece.size();) {
      const size_t size = std::min(piece.size() - done, static_cast<size_t>(granted_ - received_));
      PARVL_RETURN_IF_ERROR(link_.receive(piece.data() + done, size, deadline_));
      done += size;
      received_ += static_cast<int64_t>(size);
      const int64_t open = granted_ - received_;
      if (open > credit_ / 2 || granted_ == payload_) continue;
      const int64_t more = std::min(credit_ - open, payload_ - granted_);
      PARVL_RETURN_IF_ERROR(link_.send(TransferCredit{more}, deadline_));
      granted_ += more;
    }
    return absl::OkStatus();
  }

  TransferLink& link_;
  const Deadline deadline_;
  const int64_t credit_, payload_;
  int64_t granted_, received_ = 0;
  uint64_t checksum_ = 0;
};

absl::Status receive_all(Pulled& pulled, const TransferHandle& handle, Outputs out, const Deadline& deadline,
                         TransferPeers& peers) {
  if (pulled.answer.payload_bytes != handle.payload_bytes()) {
    return damaged(handle, "the source has another item under this number");
  }
  Receiver receiver(*pulled.link, deadline, peers.options.credit_bytes, handle.payload_bytes());
  for (const absl::Span<std::byte> tensor : out) PARVL_RETURN_IF_ERROR(receiver.receive(tensor));
  const bool good = receiver.checksum() == handle.checksum;
  pulled.link->release(handle.item, good);
  peers.give_back(pulled.key, std::move(pulled.link));
  return good ? absl::OkStatus() : damaged(handle, "the checksum does not match");
}

}  // namespace

// Lets go when destroyed.
struct TransferView::Hold {
  ~Hold() {
    std::free(copy);
    mapping.reset();
    if (!link) return;
    --link->holds;
    link->release(item, good);
  }
  void* copy = nullptr;
  std::shared_ptr<SharedSlab> mapping;
  std::shared_ptr<TransferLink> link;
  TransferId item;
  bool good = false;
};

TransferView::TransferView() = default;
TransferView::TransferView(TransferView&& other) noexcept = default;
TransferView& TransferView::operator=(TransferView&& other) noexcept = default;
TransferView::~TransferView() = default;

std::optional<size_t> TransferView::find(std::string_view name) const {
  const auto found =
      std::find_if(tensors_.begin(), tensors_.end(), [name](const auto& tensor) { return tensor.name == name; });
  if (found == tensors_.end()) return std::nullopt;
  return static_cast<size_t>(found - tensors_.begin());
}

TransferSink::TransferSink(std::shared_ptr<TransferPeers> peers) : peers_(std::move(peers)), host_(host_identity()) {}
TransferSink::~TransferSink() = default;

absl::StatusOr<std::unique_ptr<TransferSink>> TransferSink::start(const TransferSinkOptions& options) {
  PARVL_CHECK(options.clock != nullptr, "a transfer sink needs a clock");
  if (options.name.empty() || options.token.empty()) return invalid("a transfer sink needs a name and a token");
  if (options.credit_bytes < 1 || options.max_bytes < 1 || options.silence_s <= 0 || options.forget_s <= 0) {
    return invalid("the limits of the transfer sink ", options.name, " must be above 0");
  }
  auto peers = std::make_shared<TransferPeers>(options);
  PARVL_RETURN_IF_ERROR(peers->start_watching());
  return std::unique_ptr<TransferSink>(new TransferSink(std::move(peers)));
}

absl::Status TransferSink::over_lanes(const TransferHandle& handle,
                                      const std::function<absl::Status(TransferLane)>& pull) {
  absl::Status status = absl::UnavailableError(
      peers_->options.only ? absl::StrCat("it has no lane by ", to_string(*peers_->options.only), " to here")
                           : "it is on another host, and has no TCP lane");
  const std::vector<TransferLane> lanes = lanes_of(handle, peers_->options, host_);
  for (const TransferLane lane : lanes) {
    status = pull(lane);
    if (status.ok()) {
      peers_->count([&](TransferSinkCounters& counters) {
        LaneCounters& counter = lane == TransferLane::kTcp ? counters.tcp : counters.shared_memory;
        ++counter.items;
        counter.bytes += handle.payload_bytes();
        counters.fallbacks += lane != lanes.front();
      });
      return status;
    }
    if (!absl::IsUnavailable(status)) break;
  }
  peers_->count([&status](TransferSinkCounters& counters) {
    ++counters.failed;
    counters.damaged += absl::IsDataLoss(status);
  });
  return with_context(status, absl::StrCat("transfer from ", handle.source));
}

absl::StatusOr<TransferView> TransferSink::pull(const TransferHandle& handle, double timeout_s) {
  const Deadline deadline = deadline_after(*peers_->options.clock, timeout_s);
  TransferView out;
  PARVL_RETURN_IF_ERROR(over_lanes(handle, [&](TransferLane lane) {
    out = TransferView();
    return lane == TransferLane::kSharedMemory ? map_view(handle, deadline, out) : copy_view(handle, deadline, out);
  }));
  return out;
}

absl::Status TransferSink::map_view(const TransferHandle& handle, const Deadline& deadline, TransferView& out) {
  PARVL_ASSIGN_OR_RETURN(Pulled pulled, ask_by(TransferLane::kSharedMemory, handle, 0, deadline, *peers_));
  auto hold = std::make_unique<TransferView::Hold>();
  hold->link = pulled.link;
  hold->mapping = std::move(pulled.mapping);
  hold->item = handle.item;
  peers_->give_back(pulled.key, std::move(pulled.link));
  out.lane_ = TransferLane::kSharedMemory;
  out.base_ = hold->mapping->data();
  out.tensors_ = handle.tensors;
  uint64_t checksum = 0;
  for (size_t i = 0; i < out.tensors_.size(); ++i) {
    checksum = tensor_checksum(out.data(i), static_cast<size_t>(out.tensors_[i].bytes), checksum);
  }
  hold->good = checksum == handle.checksum;
  const bool good = hold->good;
  out.hold_ = std::move(hold);
  return good ? absl::OkStatus() : damaged(handle, "the checksum does not match");
}

absl::Status TransferSink::copy_view(const TransferHandle& handle, const Deadline& deadline, TransferView& out) {
  const int64_t extent = handle.extent_bytes();
  if (extent > peers_->options.max_bytes) {
    return invalid("an item of ", extent, " bytes; the limit of this sink is ", peers_->options.max_bytes);
  }
  const size_t size = (static_cast<size_t>(extent) / kAlignment + 1) * kAlignment;
  auto hold = std::make_unique<TransferView::Hold>();
  hold->copy = std::aligned_alloc(kAlignment, size);
  if (hold->copy == nullptr) return absl::ResourceExhaustedError(absl::StrCat("no memory for ", size, " bytes"));
  std::byte* const base = static_cast<std::byte*>(hold->copy);
  std::vector<absl::Span<std::byte>> parts;
  for (const TransferTensor& tensor : handle.tensors) {
    parts.emplace_back(base + tensor.offset, static_cast<size_t>(tensor.bytes));
  }
  PARVL_RETURN_IF_ERROR(receive_into(handle, parts, deadline));
  out.lane_ = TransferLane::kTcp;
  out.base_ = base;
  out.tensors_ = handle.tensors;
  out.hold_ = std::move(hold);
  return absl::OkStatus();
}

absl::Status TransferSink::receive_into(const TransferHandle& handle, Outputs out, const Deadline& deadline) {
  const int64_t credit = std::min(peers_->options.credit_bytes, handle.payload_bytes());
  PARVL_ASSIGN_OR_RETURN(Pulled pulled, ask_by(TransferLane::kTcp, handle, credit, deadline, *peers_));
  return receive_all(pulled, handle, out, deadline, *peers_);
}

absl::Status TransferSink::copy_into(const TransferHandle& handle, Outputs out, const Deadline& deadline) {
  PARVL_ASSIGN_OR_RETURN(Pulled pulled, ask_by(TransferLane::kSharedMemory, handle, 0, deadline, *peers_));
  TransferView::Hold hold;
  hold.link = pulled.link;
  hold.mapping = std::move(pulled.mapping);
  hold.item = handle.item;
  peers_->give_back(pulled.key, std::move(pulled.link));
  uint64_t checksum = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    checksum =
        copy_with_checksum(out[i].data(), hold.mapping->data() + handle.tensors[i].offset, out[i].size(), checksum);
  }
  hold.good = checksum == handle.checksum;
  return hold.good ? absl::OkStatus() : damaged(handle, "the checksum does not match");
}

absl::StatusOr<TransferLane> TransferSink::pull_into(const TransferHandle& handle, Outputs out, double timeout_s) {
  if (out.size() != handle.tensors.size()) {
    return invalid("a place for ", out.size(), " tensors; the handle has ", handle.tensors.size());
  }
  for (size_t i = 0; i < out.size(); ++i) {
    const TransferTensor& tensor = handle.tensors[i];
    if (static_cast<int64_t>(out[i].size()) != tensor.bytes) {
      return invalid("a place of ", out[i].size(), " bytes for ", excerpt(tensor.name), ", which has ", tensor.bytes);
    }
  }
  const Deadline deadline = deadline_after(*peers_->options.clock, timeout_s);
  TransferLane used = TransferLane::kTcp;
  PARVL_RETURN_IF_ERROR(over_lanes(handle, [&](TransferLane lane) {
    used = lane;
    return lane == TransferLane::kSharedMemory ? copy_into(handle, out, deadline) : receive_into(handle, out, deadline);
  }));
  return used;
}

TransferSinkCounters TransferSink::counters() const { return peers_->counters(); }

}  // namespace parvl
