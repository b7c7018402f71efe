// What the ranks of a layout say to each other in a step, for --dry-run: stands below comm's rank table.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "parvl/comm/mesh_plan.h"
#include "parvl/plan/cost/traffic.h"

namespace parvl {

// What one of a group's ranks calls in a step; all of them the same, but messages, which the first rank sends.
struct GroupTraffic {
  std::string group;
  std::vector<int64_t> ranks;  // of a message: from, to
  Traffic traffic;
};

// The layout's step, as far as the formulas need it.
struct LayoutStep {
  ModelSpec model;
  ParallelSpec parallel;
  int64_t microbatches = 1;  // of each replica
  int64_t tokens = 0;        // of each micro batch
  // Values of each flat tensor that a rank's optimizer holds of a module; empty: the module is frozen there, or not
  // there at all.
  std::function<std::vector<int64_t>(const std::string& module, int64_t rank)> trained;
  int64_t tied_values = 0;  // of the trained embedding on a rank, where a pipeline's last stage has a copy
};

// By group, in the order in which ranks make them; groups without calls are left out. Data parallel groups (gradients,
// ZeRO-1), the pipeline's messages, the tied embedding. Left out: the few scalars that ranks agree on, tensor parallel
// groups, and images' features on their way to the first stage.
std::vector<GroupTraffic> step_traffic(const MeshPlan& plan, const LayoutStep& step);

// A line each: "group  ranks  call  calls  bytes  sent", as Traffic means them, and of all ranks together.
std::string traffic_table(const std::vector<GroupTraffic>& rows);

// `trained` of a layout without tensor parallelism, of which all is trained by one learning rate and weight decay:
// a module's values, or those of the rank's stage.
std::vector<int64_t> values_without_tp(const MeshPlan& plan, const LayoutStep& step, const std::string& module,
                                       int64_t rank);

}  // namespace parvl
