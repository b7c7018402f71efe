// What a rank's tensors take at the moments when its thread asks for the time.
#pragma once

#include <algorithm>
#include <atomic>

#include "counting_allocator.h"
#include "parvl/base/clock.h"

namespace parvl {

// The real clock; each time that it is asked by a rank's thread it looks at what that rank's tensors take. The pipeline
// asks at each action's beginning and end.
class LookingClock : public Clock {
 public:
  struct Rank {
    std::atomic<int64_t> live = 0;
    int64_t most = 0;
  };
  int64_t now_ns() const override {
    if (t_rank != nullptr) t_rank->most = std::max<int64_t>(t_rank->most, t_rank->live);
    return real_.now_ns();
  }
  int64_t wall_ns() const override { return real_.wall_ns(); }
  static void look_at(Rank* rank) {
    CountingAllocator::count_mine(rank == nullptr ? nullptr : &rank->live);
    t_rank = rank;
  }

 private:
  static inline thread_local Rank* t_rank = nullptr;
  RealClock real_;
};

}  // namespace parvl
