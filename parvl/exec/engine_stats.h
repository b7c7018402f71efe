// What an engine counts. Torch-free.
#pragma once

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

// As of the last step; those of Scheduler, and what each module has done since the start.
struct EngineStats : SchedulerStats {
  double backbone_busy_s = 0, encoder_busy_s = 0;
  std::array<WorkCount, kWorkNames.size()> work = {};
};

}  // namespace parvl
