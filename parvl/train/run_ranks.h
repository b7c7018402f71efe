// The ranks of a training run: who this process is among them, and what all must agree on.
#pragma once

#include <absl/types/span.h>

#include <memory>

#include "parvl/base/parallel_spec.h"
#include "parvl/comm/checked_group.h"
#include "parvl/comm/device_mesh.h"
#include "parvl/nn/param.h"
#include "parvl/plan/pipeline/schedule.h"
#include "parvl/train/data.h"
#include "parvl/train/vision_share.h"

namespace parvl {

// One thread. Alone, everything is immediate.
class RunRanks {
 public:
  // What each rank can say by itself of a layout over so many processes, so that one that refuses it leaves no other
  // waiting: InvalidArgument for one that does not fit the model or their number.
  static absl::StatusOr<MeshPlan> plan(const ParallelSpec& spec, const ModelSpec& model, int64_t started);
  // Connects to the others; all ranks call it. `communicator` null: one process. It outlives this. All groups are
  // checked (parvl/comm/checked_group.h).
  static absl::StatusOr<std::unique_ptr<RunRanks>> create(const ParallelSpec& spec, const ModelSpec& model,
                                                          Communicator* communicator, const CheckOptions& checks);
  // One process.
  explicit RunRanks(const ModelSpec& model)
      : tied_(model.backbone.tied), parts_{{0, model.backbone.layers, true, true}} {}

  int64_t rank() const { return mesh_ == nullptr ? 0 : mesh_->rank(); }
  int64_t world() const { return mesh_ == nullptr ? 1 : mesh_->plan().world; }
  bool is_first() const { return rank() == 0; }  // writes what the run writes
  BatchShare share(int64_t micro_batch) const;
  // Whether the vision encoder has ranks of its own (with the projector), and this is one of them: it has no part of
  // the backbone and serves all replicas.
  bool encoder_apart() const { return encoder_apart_; }
  bool is_encoder() const { return stage() == kEncoderStage; }
  EncoderShare encoder_share() const;
  // Of a group of them: the ranks that encode an image together, and their places among all encoder ranks.
  std::vector<int64_t> encoder_ranks(int64_t group) const;
  int64_t encoder_place(int64_t rank) const;
  // The first stage of a replica: who gets embeddings of images.
  std::vector<int64_t> first_stage(int64_t replica) const;
  // Messages of an encoder rank to a rank of a first stage, or back; this one is one of them.
  ProcessGroup* images(int64_t from, int64_t to) const;
  // The ranks that hold a module's parameters and train on other samples; null when there are none.
  ProcessGroup* data(Module module) const;
  // The ranks that a module's matrices are cut over; null when they are not.
  ProcessGroup* tensor(Module module) const;
  // The ranks that train on the same samples as this one; null when there is none.
  ProcessGroup* replica() const;
  // One rank of each replica: what its ranks have alike is counted there.
  bool counts() const { return !is_encoder() && (replica() == nullptr || replica()->rank() == 0); }
  // The stages of the backbone's pipeline, this rank's (kEncoderStage: none), and what it holds.
  int64_t stages() const { return static_cast<int64_t>(parts_.size()); }
  int64_t stage() const;
  StagePart part() const { return is_encoder() ? StagePart() : parts_[static_cast<size_t>(stage())]; }
  // Messages from one stage to its neighbour; this rank's is one of them.
  ProcessGroup* between_stages(int64_t from, int64_t to) const;
  // The first and the last stage, which both hold a tied embedding; null elsewhere.
  ProcessGroup* tied() const;
  // Whether a stage, or kEncoderStage, holds a parameter (all stages do, of modules that lie on the LLM's ranks); and
  // any that is trained.
  bool holds(const Param& param, int64_t stage) const;
  bool trains(const ParamTable& params, int64_t stage) const;
  // Whether the first and the last stage both hold it.
  bool on_two_stages(const Param& param) const {
    return stages() > 1 && param.module == Module::kBackbone && holds(param, 0) && holds(param, stages() - 1);
  }
  // One rank of each replica: the one whose loss counts.
  bool counts_loss() const {
    return part().head && (tensor(Module::kBackbone) == nullptr || tensor(Module::kBackbone)->rank() == 0);
  }
  // A whole tensor of the parameter's global shape, on every rank; all call it. `own`: this rank's part; undefined
  // where it has none.
  at::Tensor whole(const ParamTable& params, const Param& param, const at::Tensor& own,
                   at::TensorOptions options) const;
  // Sums a scalar of float64 over all ranks, in place; on a GPU the host waits for it. Throws.
  void sum(const at::Tensor& value) const;
  // Whether this rank is the first of those that hold the same part of a parameter for the same samples. (Which of the
  // data group's ranks counts is the caller's to say.)
  bool counts(const Param& param) const;
  // How a micro batch's images are dealt out: over its replica's ranks, or those of the encoder's own. The model must
  // have a vision encoder.
  VisionLayout vision_layout() const;

  // Sums over all ranks, in place. All ranks call it, as they do the rest.
  absl::Status sum(absl::Span<double> values) const;
  // This rank's status when that is an error; else the news that another rank has failed, and which; else OK. So that
  // nobody goes on, or waits, alone.
  absl::Status agree(const absl::Status& mine) const;
  // The last rank that has failed, -1 when none has; an error when the ranks cannot be asked.
  absl::StatusOr<int64_t> last_failed(bool mine) const;
  // OK when all ranks have made the same group calls so far; else InvalidArgument naming the first that differs. No
  // message may be under way.
  absl::Status compare() const;

  // The sum of whole numbers over all ranks, modulo 2^64, exact. At most 2^20 ranks.
  absl::Status sum_exactly(absl::Span<uint64_t> values) const;

  // OK when these texts are equal on all ranks; else InvalidArgument naming the first that is not, and the fix.
  absl::Status expect_equal(const std::vector<std::pair<std::string, std::string>>& named,
                            const std::string& fix) const;
  // Ends the others' calls, as far as the backend can.
  void abort(const std::string& reason) const;

 private:
  // This rank's group of that name; null when it is in none, or there is one process alone.
  ProcessGroup* group(const std::string& name) const { return mesh_ == nullptr ? nullptr : mesh_->group(name); }
  const RankGrid& llm() const;
  const RankGrid& encoder() const;

  std::unique_ptr<CheckedCommunicator> checked_;  // null: one process
  std::unique_ptr<DeviceMesh> mesh_;              // likewise; its groups are checked_'s
  bool tied_ = false;                             // the output matrix is the embedding
  bool encoder_apart_ = false;
  std::vector<StagePart> parts_;  // by stage
};

}  // namespace parvl
