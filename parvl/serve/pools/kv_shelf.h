// Keys and values that an instance has computed for others: they lie here, in memory that others may read, until the
// gateway lets them go.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "parvl/comm/transfer/transfer_source.h"
#include "parvl/exec/engine.h"

namespace parvl {

// Any thread.
class KvShelf {
 public:
  using Attempt = std::pair<int64_t, int32_t>;  // of a request
  explicit KvShelf(std::unique_ptr<TransferSource> source) : source_(std::move(source)) {}

  // Waits for memory that others' lie in, so that a slow reader stops the prompts that come after, and nothing grows.
  // Cancelled once nobody wants it any more, which is the only limit here: the gateway knows the request's.
  absl::StatusOr<std::shared_ptr<KvRoom>> make_room(const std::vector<TransferTensor>& layout,
                                                    const std::stop_token& stop);
  // What was written into it, which nobody writes to any more: its TransferHandle, encoded. `room`: of make_room.
  std::string publish(const Attempt& of, KvRoom& room);
  // Of an attempt that has nothing here: no effect.
  void let_go(const Attempt& of);
  void fence(const std::string& reader, int64_t epoch) { source_->fence(reader, epoch); }

 private:
  struct Room;
  const std::unique_ptr<TransferSource> source_;
  std::mutex mutex_;
  std::map<Attempt, TransferId> items_;
};

}  // namespace parvl
