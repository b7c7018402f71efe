// The other ranks of an engine as processes of this machine: `parvl rank`, children of this one that die with it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parvl/base/clock.h"
#include "parvl/exec/engine_load.h"
#include "parvl/exec/engine_ranks.h"

namespace parvl {

struct RankProcessOptions {
  std::string program;  // the executable
  // A rank has ended, or hangs; see EngineRanks::Parts. Until all have started it is `loading` too.
  std::function<void(const absl::Status& why, bool loading)> on_lost;
  bool watch_steps = true;  // nobody else does
};

// Makes `engine.ranks()` processes compute together, this one included: sets what starts the others, and a watch that
// takes them for lost, and ends them, when a step or an image takes far longer than such steps and images have taken.
// Nothing for one rank. `clock` outlives the engine.
void use_rank_processes(EngineOptions& engine, const RankProcessOptions& options, const Clock& clock);

}  // namespace parvl
