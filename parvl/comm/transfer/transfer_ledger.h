// Who uses which piece of a source's shared memory: free, being written, published, or quarantined because a reader
// still has it. Decides when memory is given out again. No sockets, no threads, no time of its own.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parvl/base/ids.h"
#include "parvl/base/status.h"
#include "parvl/comm/transfer/transfer_counters.h"
#include "parvl/comm/transfer/transfer_handle.h"
#include "parvl/comm/transfer/transfer_slab.h"

namespace parvl {

using ReaderId = StrongId<struct TransferReaderTag, int64_t>;  // a connection; never used twice

struct TransferReader {
  std::string name;  // the instance that pulls
  int64_t epoch = 0;
  TransferLane lane = TransferLane::kSharedMemory;
};

// Where the tensors lie in an item's memory.
struct TransferContent {
  struct Part {
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  std::vector<Part> parts;
  int64_t payload_bytes = 0;  // of all parts
};

struct LedgerLimits {
  int64_t bytes = 0;
  int64_t items = 0;
  int64_t holds_per_reader = 128;
};

// Memory comes in slabs of a little more than an item's size, one an item. A slab that a reader may still see is not
// written again: it is given out when every reader has released it or is gone, and given up (this process forgets it)
// when one was cut off while it may still read. Not thread-safe.
class TransferLedger {
 public:
  // `label` shows in /proc as the memory's name.
  TransferLedger(const LedgerLimits& limits, std::string label);
  ~TransferLedger();

  struct Memory {
    int64_t slab = 0;  // never used twice
    std::shared_ptr<SharedSlab> memory;
  };
  struct Hold : Memory {
    std::shared_ptr<const TransferContent> content;
  };
  // ResourceExhausted: no room now; InvalidArgument: there will never be. The item is the caller's to write until
  // `publish` or `cancel`.
  absl::StatusOr<TransferId> reserve(int64_t bytes);
  const Memory& memory(TransferId reserved) const;
  void cancel(TransferId reserved);
  // `pulls`: it drops itself after so many good releases; 0: never.
  void publish(TransferId reserved, std::shared_ptr<const TransferContent> content, int64_t lease_end_ns,
               int64_t pulls);
  // No more reader gets it. False when it was not there any more.
  bool drop(TransferId item, int64_t now_ns);

  // FailedPrecondition: that reader was fenced.
  absl::Status admit(ReaderId id, const TransferReader& reader);
  // The reader has it until `release`. NotFound: dropped, or its lease is over; FailedPrecondition: the reader was cut
  // off; ResourceExhausted: it holds too many.
  absl::StatusOr<Hold> acquire(ReaderId reader, TransferId item, int64_t now_ns);
  // False when the reader does not have it.
  bool release(ReaderId reader, TransferId item, bool good, int64_t now_ns);
  // The reader is dead, or has let go of everything.
  void leave(ReaderId reader);
  // It gets nothing any more. What it has through shared memory is given up.
  void cut_off(ReaderId reader);
  // Cuts off all that have this name and this epoch or an older one, now and in future; gives those that were there.
  std::vector<ReaderId> fence(const std::string& name, int64_t epoch);
  // Ends leases, and cuts off readers that have kept a dropped item for `patience_ns` (0: for ever).
  std::vector<ReaderId> expire(int64_t now_ns, int64_t patience_ns);
  // When `expire` has something to do next; INT64_MAX: nothing yet.
  int64_t next_expiry_ns(int64_t patience_ns) const;

  // Whether memory has become free since the last call.
  bool take_freed() { return std::exchange(freed_, false); }
  // Counters are also its owner's to count in; gauges are set here.
  TransferSourceCounters& counts() { return counts_; }
  TransferSourceCounters counters() const;

 private:
  enum class State { kReserved, kPublished, kDropped };
  struct Item {
    State state = State::kReserved;
    Memory memory;
    bool given_up = false;  // a reader that was cut off may still see it
    std::shared_ptr<const TransferContent> content;
    int64_t lease_end_ns = 0;
    int64_t pulls_left = 0;  // 0: any number
    int64_t dropped_ns = 0;
    std::map<ReaderId, int64_t> holds;
  };
  struct Reader : TransferReader {
    bool cut_off = false;
    int64_t holds = 0;
  };
  using Items = std::map<TransferId, Item>;

  absl::StatusOr<Memory> take_memory(int64_t bytes);
  bool evict_one();
  void set_dropped(Item& item, int64_t now_ns);
  // Ends a dropped item that nobody reads; gives the place after `at`.
  Items::iterator free_if_done(Items::iterator at);
  void free_memory(Item& item);
  bool is_overdue(const Item& item, int64_t now_ns, int64_t patience_ns) const;

  const LedgerLimits limits_;
  const std::string label_;
  Items items_;
  std::map<ReaderId, Reader> readers_;
  std::map<std::string, int64_t> fenced_;    // name → last epoch that gets nothing
  std::multimap<int64_t, Memory> free_;      // by size
  int64_t used_bytes_ = 0, free_bytes_ = 0;  // of slabs
  int64_t next_item_ = 1, next_slab_ = 1;
  bool freed_ = false;
  TransferSourceCounters counts_;
};

}  // namespace parvl
