// The sending end of transfers: writes sets of named tensors into shared memory, once, and lets readers on this host
// map them and readers on others fetch them over TCP.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"
#include "parvl/comm/transfer/transfer_counters.h"
#include "parvl/comm/transfer/transfer_handle.h"
#include "parvl/comm/transfer/transfer_slab.h"

namespace parvl {

struct TransferSourceOptions {
  std::string name;   // the instance; at most 64 bytes
  int64_t epoch = 0;  // of its life: no two sources of a run have the same name and epoch
  std::string token;  // of the run, 16 to 256 bytes: who does not say it gets nothing. TCP carries it in the clear
  const Clock* clock = nullptr;  // thread-safe; outlives this
  int64_t arena_bytes = int64_t{1} << 30;
  int64_t max_items = 512;  // each has a descriptor
  int64_t max_connections = 256;
  std::string tcp_listen;                        // "10.0.0.3:0", "0.0.0.0:4711"; "": no TCP lane
  std::string tcp_host;                          // what handles say instead of the address above; for 0.0.0.0 and ::
  int64_t max_credit_bytes = int64_t{64} << 20;  // that a TCP reader may give
  double silence_s = 10;                         // then a TCP reader that is being sent to, or a stranger, is given up
  // So long a reader may keep an item after it was dropped, then it is cut off; 0: until `fence`.
  double patience_s = 30;
  // Memory has come free after a `reserve` failed. On the source's thread; must not wait, nor destroy the source.
  std::function<void()> on_room;
};

// For how long readers may begin to pull.
struct TransferLease {
  double seconds = 60;
  int64_t pulls = 0;  // the item drops itself after so many good ones; 0: any number
};

struct TransferSourceState;
class TransferServer;

// Memory of one item, to write its tensors into. Gives it back when destroyed, unless it was published. One thread at a
// time; may outlive its source.
class TransferRegion {
 public:
  TransferRegion() = default;  // empty
  TransferRegion(TransferRegion&& other) noexcept = default;
  TransferRegion& operator=(TransferRegion&& other) noexcept;
  ~TransferRegion();

  TransferId item() const { return item_; }
  const std::vector<TransferTensor>& tensors() const { return tensors_; }
  // Of memory in which the tensors lie at their offsets, for another process to fill. ResourceExhausted: no descriptor.
  absl::StatusOr<FileDescriptor> open_to_write() const;
  // Of the tensor with this place in `tensors`: `bytes` of them, at a multiple of 64. Holds anything at first.
  std::byte* data(size_t tensor) const { return memory_->data() + tensors_[tensor].offset; }

 private:
  friend class TransferSource;
  void give_back();
  std::shared_ptr<TransferSourceState> state_;  // null: empty
  TransferId item_;
  int64_t slab_ = 0;
  std::shared_ptr<SharedSlab> memory_;
  std::vector<TransferTensor> tensors_;
};

// Memory is bounded by arena_bytes, which is the credit: a reader that is slow makes `reserve` fail, and nothing grows.
// An item that was dropped, or whose lease is over, stays in memory (quarantined) until all that have it have let go or
// are dead; only memory that nobody can see is written again. What a reader has that was cut off while it may still
// look (a stopped process) is left to it and forgotten here: beyond arena_bytes, until that process goes on or ends.
// All of it is gone with the processes, also after kill -9: nothing has a name. Any thread may call.
class TransferSource {
 public:
  // InvalidArgument: an option; else why it cannot listen. Starts one thread.
  static absl::StatusOr<std::unique_ptr<TransferSource>> start(const TransferSourceOptions& options);
  // Ends all connections. What readers have mapped stays theirs.
  ~TransferSource();

  // Names, types and shapes are the caller's; offsets and bytes are set. Waits at most `wait_s` for room, then
  // ResourceExhausted; InvalidArgument: there will never be room, or place_tensors refuses.
  absl::StatusOr<TransferRegion> reserve(std::vector<TransferTensor> tensors, double wait_s = 0);
  // From here on nobody may write to it. Takes the checksum, on this thread.
  TransferHandle publish(TransferRegion region, const TransferLease& lease);
  // The same of what another process has filled, which says the checksum; here nobody looks at it.
  TransferHandle publish(TransferRegion region, const TransferLease& lease, uint64_t checksum);
  // False: it was not there any more.
  bool drop(TransferId item);
  // No connection of this reader's epochs up to this one gets anything from now on; gives how many there were. What it
  // may still be reading from shared memory is never written again.
  int64_t fence(const std::string& reader, int64_t epoch);

  TransferSourceCounters counters() const;

 private:
  explicit TransferSource(std::shared_ptr<TransferSourceState> state);

  std::shared_ptr<TransferSourceState> state_;
  std::unique_ptr<TransferServer> server_;
};

}  // namespace parvl
