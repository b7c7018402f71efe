// A rank's place in a mesh plan, with its ends of all groups that it is in.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "parvl/comm/communicator.h"
#include "parvl/comm/mesh_plan.h"

namespace parvl {

class DeviceMesh {
 public:
  // Joins this rank's groups in the plan's order, which is the same on all ranks, so that none waits for another in a
  // circle. All ranks call it; it returns when all are connected. `plan.world` must be the communicator's.
  static absl::StatusOr<std::unique_ptr<DeviceMesh>> connect(MeshPlan plan, Communicator& communicator);

  const MeshPlan& plan() const { return plan_; }
  int64_t rank() const { return rank_; }
  // This rank's group of a kind, by the group's name without its number: "world", "llm_backbone.tp",
  // "llm_backbone.pp.0>1". Null where the rank would be alone in it, or is not on the module.
  ProcessGroup* group(const std::string& kind) const;
  // Of all this rank's groups.
  void abort(const std::string& reason);

 private:
  MeshPlan plan_;
  int64_t rank_ = 0;
  std::map<std::string, std::unique_ptr<ProcessGroup>> groups_;
};

}  // namespace parvl
