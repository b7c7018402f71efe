// The ranks that a backbone is cut over, as one of them has them: each stage of a pipeline has some of the layers, and
// of each matrix its tensor-parallel ranks have a part each.
#pragma once

#include <memory>
#include <string>

#include "parvl/comm/device_mesh.h"

namespace parvl {

// Which groups so many ranks talk in: those of a stage, each rank with the same one of the next stage, and for the
// logits the first rank of the last stage with the very first. Pure. Tensor parallelism is the fastest axis.
MeshPlan plan_backbone_ranks(int64_t tensor, int64_t stages);

// One thread, but for abort.
class BackboneRanks {
 public:
  // `world`: of all ranks, which all call this; their number is a multiple of the stages'. `gpus`: over it, where they
  // compute on GPUs; null on the CPU. `world` outlives this.
  static absl::StatusOr<std::shared_ptr<BackboneRanks>> connect(Communicator& world, std::unique_ptr<Communicator> gpus,
                                                                int64_t stages);

  int64_t size() const { return mesh_->plan().world; }
  int64_t stages() const { return stages_; }
  int64_t stage() const { return stage_; }

  // The ranks that this stage's matrices are cut over; null: it has one.
  ProcessGroup* tensor() const { return mesh_->group("llm_backbone.tp"); }
  // What comes from the stage before, as its member 1, and goes to the next one, as its member 0; null where there is
  // none.
  ProcessGroup* from_before() const { return between(stage_ - 1); }
  ProcessGroup* to_next() const { return between(stage_); }
  // Logits go from member 1, in the last stage, to member 0, the first rank of all; null on other ranks and without a
  // pipeline.
  ProcessGroup* logits() const { return mesh_->group("llm_backbone.logits"); }

  void abort(const std::string& reason) { mesh_->abort(reason); }

 private:
  ProcessGroup* between(int64_t stage) const;

  std::unique_ptr<Communicator> gpus_;
  std::unique_ptr<DeviceMesh> mesh_;
  int64_t stages_ = 1, stage_ = 0;
};

}  // namespace parvl
