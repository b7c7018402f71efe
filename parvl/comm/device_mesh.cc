#include "parvl/comm/device_mesh.h"

#include <algorithm>
#include <utility>

#include "parvl/base/check.h"

namespace parvl {
namespace {

// "llm_backbone.pp[3].0>1" → "llm_backbone.pp.0>1"
std::string kind_of(std::string name) {
  const size_t open = name.find('[');
  if (open != std::string::npos) name.erase(open, name.find(']') + 1 - open);
  return name;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMesh>> DeviceMesh::connect(MeshPlan plan, Communicator& communicator) {
  if (plan.world != communicator.world()) {
    return invalid("the layout has ", plan.world, plan.world == 1 ? " rank" : " ranks", ", but ", communicator.world(),
                   " processes were started; start ", plan.world, ", or change the recipe's parallel section");
  }
  auto out = std::make_unique<DeviceMesh>();
  out->rank_ = communicator.rank();
  for (const GroupSpec& group : plan.groups) {
    if (std::find(group.ranks.begin(), group.ranks.end(), out->rank_) == group.ranks.end()) continue;
    PARVL_ASSIGN_OR_RETURN(auto joined, communicator.join(group));
    PARVL_CHECK(out->groups_.emplace(kind_of(group.name), std::move(joined)).second, "a rank in two groups of a kind");
  }
  out->plan_ = std::move(plan);
  return out;
}

ProcessGroup* DeviceMesh::group(const std::string& kind) const {
  const auto found = groups_.find(kind);
  return found == groups_.end() ? nullptr : found->second.get();
}

void DeviceMesh::abort(const std::string& reason) {
  for (const auto& [kind, group] : groups_) group->abort(reason);
}

}  // namespace parvl
