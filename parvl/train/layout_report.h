// What the ranks of a layout say to each other in a step and what they hold, for --dry-run: stands below comm's rank
// table.
#pragma once

#include <string>
#include <vector>

#include "parvl/plan/cost/traffic.h"
#include "parvl/train/layout.h"

namespace parvl {

// What one of a group's ranks calls in a step; all of them the same, but messages, which the first rank sends.
struct GroupTraffic {
  std::string group;
  std::vector<int64_t> ranks;  // of a message: from, to
  Traffic traffic;
};

// By group, in the order in which ranks make them; groups without calls are left out. All that Trainer::train_step
// calls, where every replica has `microbatches` with a token to learn.
absl::StatusOr<std::vector<GroupTraffic>> step_traffic(const Layout& layout, const StepMicrobatches& microbatches);

// A line each: "group  ranks  call  calls  bytes  sent", as Traffic means them, and of all ranks together.
std::string traffic_table(const std::vector<GroupTraffic>& rows);

// A line a rank: "rank  weights  gradients  optimizer  activations  together".
std::string bytes_table(const std::vector<RankBytes>& ranks);

}  // namespace parvl
