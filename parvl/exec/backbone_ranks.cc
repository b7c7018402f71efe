#include "parvl/exec/backbone_ranks.h"

#include <utility>

#include "parvl/base/check.h"

namespace parvl {

MeshPlan plan_backbone_ranks(int64_t tensor, int64_t stages) {
  MeshPlan out;
  out.world = tensor * stages;
  const RankGrid grid({{"tp", tensor}, {"pp", stages}});
  const auto cut = grid.groups({"tp"}), pipelines = grid.groups({"pp"});
  for (size_t i = 0; tensor > 1 && i < cut.size(); ++i) {
    out.groups.push_back({absl::StrCat("llm_backbone.tp[", i, "]"), cut[i]});
  }
  for (size_t i = 0; i < pipelines.size(); ++i) {
    for (size_t stage = 0; stage + 1 < pipelines[i].size(); ++stage) {
      out.groups.push_back({absl::StrCat("llm_backbone.pp[", i, "].", stage, ">", stage + 1),
                            {pipelines[i][stage], pipelines[i][stage + 1]}});
    }
  }
  if (stages > 1) out.groups.push_back({"llm_backbone.logits", {0, (stages - 1) * tensor}});
  return out;
}

absl::StatusOr<std::shared_ptr<BackboneRanks>> BackboneRanks::connect(Communicator& world,
                                                                      std::unique_ptr<Communicator> gpus,
                                                                      int64_t stages) {
  PARVL_CHECK(stages > 0 && world.world() % stages == 0, "ranks that do not fill the stages of a pipeline");
  const int64_t tensor = world.world() / stages;
  auto out = std::make_shared<BackboneRanks>();
  Communicator& communicator = gpus == nullptr ? world : *gpus;
  PARVL_ASSIGN_OR_RETURN(out->mesh_, DeviceMesh::connect(plan_backbone_ranks(tensor, stages), communicator));
  out->gpus_ = std::move(gpus);
  out->stages_ = stages;
  out->stage_ = world.rank() / tensor;
  return out;
}

ProcessGroup* BackboneRanks::between(int64_t stage) const {
  return mesh_->group(absl::StrCat("llm_backbone.pp.", stage, ">", stage + 1));
}

}  // namespace parvl
