// The other ranks of an engine as processes of this machine: `parvl rank`, children of this one that die with it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parvl/exec/engine_ranks.h"

namespace parvl {

struct RankProcessOptions {
  std::string program;  // the executable
  int64_t ranks = 2;    // this process's included
  // A rank has ended; see EngineRanks::Parts. Until all have started it is `loading` too.
  std::function<void(const absl::Status& why, bool loading)> on_lost;
};

// What EngineOptions::start_ranks does: starts them and returns when all are connected.
std::function<absl::StatusOr<std::unique_ptr<EngineRanks>>()> rank_processes(const RankProcessOptions& options);

}  // namespace parvl
