// What an engine counts. Torch-free.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "parvl/sched/scheduler.h"

namespace parvl {

// A step in which every sequence has one token, one with a part of a prompt, an encoding.
enum class WorkKind { kDecode, kPrefill, kEncode };
inline constexpr std::array<const char*, 3> kWorkNames = {"decode", "prefill", "encode"};
struct WorkCount {
  int64_t replayed = 0;  // by one launch of recorded work (CUDA graphs)
  int64_t launched = 0;  // operation by operation
};

// The time that one worker was busy, from the spans of its jobs, told in the order of their ends. What was computed at
// once counts once.
class BusyTime {
 public:
  void add(double start_s, double end_s) {
    total_s_ += std::max(0.0, end_s - std::max(start_s, until_s_));
    until_s_ = std::max(until_s_, end_s);
  }
  double total_s() const { return total_s_; }

 private:
  double total_s_ = 0, until_s_ = 0;
};

// As of the last step; those of Scheduler, and what each module has done since the start.
struct EngineStats : SchedulerStats {
  double backbone_busy_s = 0, encoder_busy_s = 0;
  int64_t fetched = 0;      // images whose encoder output came from elsewhere
  int64_t handed_over = 0;  // sequences whose keys and values were left for another engine
  double fetch_busy_s = 0;
  std::array<WorkCount, kWorkNames.size()> work = {};
};

}  // namespace parvl
