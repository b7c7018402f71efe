#include "parvl/serve/pools/kv_shelf.h"

#include <absl/strings/str_cat.h>

namespace parvl {
namespace {

constexpr double kBreath_s = 0.2;  // between two looks at whether it is still wanted
constexpr double kLease_s = 1e9;   // the gateway says when it is not needed; without a gateway this process ends

}  // namespace

struct KvShelf::Room : KvRoom {
  explicit Room(TransferRegion memory) : region(std::move(memory)) {
    for (size_t i = 0; i < region.tensors().size(); ++i) {
      pieces.emplace_back(region.data(i), static_cast<size_t>(region.tensors()[i].bytes));
    }
  }
  TransferRegion region;
};

absl::StatusOr<std::shared_ptr<KvRoom>> KvShelf::make_room(const std::vector<TransferTensor>& layout,
                                                           const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    auto region = source_->reserve(layout, kBreath_s);
    if (region.ok()) return std::make_shared<Room>(*std::move(region));
    if (!absl::IsResourceExhausted(region.status())) return region.status();
  }
  return absl::CancelledError("cancelled");
}

std::string KvShelf::publish(const Attempt& of, KvRoom& room) {
  const TransferHandle handle = source_->publish(std::move(static_cast<Room&>(room).region), {.seconds = kLease_s});
  std::lock_guard lock(mutex_);
  items_.emplace(of, handle.item);
  return handle.encode();
}

void KvShelf::let_go(const Attempt& of) {
  std::unique_lock lock(mutex_);
  const auto item = items_.extract(of);
  lock.unlock();
  if (!item.empty()) source_->drop(item.mapped());
}

}  // namespace parvl
