// What each rank of a recipe's layout holds and computes, by formula: from the recipe and the model's configuration
// alone, without tensors. Pure.
#pragma once

#include <string>
#include <vector>

#include "parvl/comm/mesh_plan.h"
#include "parvl/plan/cost/activations.h"
#include "parvl/plan/cost/values.h"
#include "parvl/plan/pipeline/schedule.h"
#include "parvl/train/param_settings.h"

namespace parvl {

// A flat tensor of a rank's optimizer (OptimGroupState): parameters of one module, one learning rate and weight decay,
// cut alike.
struct FlatTensor {
  std::string module;
  double lr = 0, weight_decay = 0;
  int64_t parts = 1, copies = 1;  // as HeldPart
  bool on_two_stages = false;     // the tied embedding of a pipeline
  int64_t values = 0;             // this rank's
};

struct RankPart {
  std::vector<FlatTensor> trained;
  int64_t frozen_values = 0;
};

// One micro batch, as far as formulas need it.
struct StepMicrobatch {
  int64_t tokens = 0, targets = 0;
  // Of the images of each encoder group, the replica's or the encoder's own; empty: it has no image.
  std::vector<int64_t> patches;
  bool has_images() const { return !patches.empty(); }
};
using StepMicrobatches = std::vector<std::vector<StepMicrobatch>>;  // of each replica; each has a token to learn

struct RankBytes {
  int64_t weights = 0;    // in the training type, with what ZeRO-1 fills up
  int64_t gradients = 0;  // in the masters' type
  int64_t optimizer = 0;  // moments, and masters beside 16-bit weights
  int64_t activations = 0;
  int64_t total() const { return weights + gradients + optimizer + activations; }
};

class Layout {
 public:
  // InvalidArgument, as training itself would say it: degrees that do not fit together, heads that cannot be cut,
  // stages without layers, patterns that match nothing.
  static absl::StatusOr<Layout> create(const ModelSpec& model, const Recipe& recipe);

  const ModelSpec& model() const { return model_; }
  const Recipe& recipe() const { return recipe_; }
  const MeshPlan& mesh() const { return mesh_; }
  const RankPart& part(int64_t rank) const { return ranks_[static_cast<size_t>(rank)]; }
  StagePart stage(int64_t rank) const { return part_of_stage(stage_of(rank)); }
  int64_t stages() const { return static_cast<int64_t>(stages_.size()); }
  // Of a rank that the vision encoder has for itself: kEncoderStage, and replica −1.
  int64_t stage_of(int64_t rank) const;
  int64_t replica_of(int64_t rank) const;
  int64_t replicas() const { return backbone().grid.size("dp"); }
  bool encoder_apart() const;  // it has ranks of its own
  // Its place among its replica's ranks, or the encoder's own.
  int64_t place_of(int64_t rank) const;
  int64_t replica_ranks() const { return backbone().grid.size("tp") * stages(); }
  // Ranks among which a micro batch's images are dealt out: the replica's, or the encoder's own.
  int64_t encoding_ranks() const;
  const ModuleMesh& backbone() const { return mesh_.modules.front(); }

  DType dtype() const { return dtype_; }
  DType master() const { return dtype_ == DType::kFloat64 ? dtype_ : DType::kFloat32; }
  // How a module's rows are cut; 1 rank where it is not there.
  TensorCut cut(const std::string& module) const;
  // Ranks that hold the same part of the module's weights.
  int64_t data_ranks(const std::string& module) const;
  // The flat tensor with what ZeRO-1 fills up.
  int64_t padded(const FlatTensor& tensor) const;

  // Of one micro batch, as SegmentList derives them: what each piece's backward computes. Empty `vision`: no images.
  // Empty `stage`: kEncoderStage.
  struct Pieces {
    std::vector<PieceBackward> vision;  // patch embedding, blocks
    PieceBackward projector;
    std::vector<PieceBackward> stage;  // as backbone_tensor_traffic wants them
  };
  Pieces pieces(int64_t stage, const StepMicrobatch& microbatch) const;
  bool vision_trained() const { return vision_trained_; }
  // The tied embedding's values on a rank, where its gradient is summed over the first and the last stage.
  int64_t tied_values(int64_t rank) const;
  // Of one replica; or, for an encoder's own ranks, of all. The images' work is its own only with several stages or
  // an encoder apart.
  absl::StatusOr<PipelineSchedule> schedule(const StepMicrobatches& replicas) const;
  // The micro batches that a rank has to do with: its replica's, or all of them.
  StepMicrobatches microbatches_of(int64_t rank, const StepMicrobatches& all) const;
  // Merged rows of each rank that encodes.
  std::vector<int64_t> merged_rows(const StepMicrobatch& microbatch) const;

  absl::StatusOr<RankBytes> bytes(int64_t rank, const StepMicrobatches& microbatches) const;

 private:
  absl::Status deal_out();
  void find_what_trains();
  bool trains(const std::string& prefix) const;
  bool stage_trains(int64_t stage) const;
  StagePart part_of_stage(int64_t stage) const;
  absl::StatusOr<int64_t> activations(int64_t rank, const StepMicrobatches& replicas) const;
  int64_t image_activations(int64_t rank, const StepMicrobatch& microbatch) const;

  ModelSpec model_;
  Recipe recipe_;
  DType dtype_ = DType::kFloat32;
  MeshPlan mesh_;
  std::vector<StagePart> stages_;
  std::vector<ParamSpec> params_;
  std::vector<ParamSettings> settings_;  // of each
  // Whether each piece trains: the encoder's with the projector, and the backbone's.
  std::vector<bool> vision_pieces_, backbone_pieces_;
  bool vision_trained_ = false;
  std::vector<RankPart> ranks_;
};

}  // namespace parvl
