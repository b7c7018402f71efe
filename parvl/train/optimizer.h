// AdamW and SGD over flat memory: the trained parameters of one group (same learning rate and weight decay) lie one
// after another, so a step is a few kernels whatever the number of parameters, and sharding it cuts one tensor.
//
// Data parallel: a group's gradients are summed over the ranks of its module's data group. With ZeRO-1 (Rajbhandari et
// al., "ZeRO", 2020, stage 1) each of these ranks keeps the optimizer's state of one part of the flat tensor, updates
// that part and gives its values to the others.
//
// Tensor parallel (nn/tensor_parallel.h): the flat tensors hold this rank's parts. What is whole on every rank of a
// module's tensor group has a part of its gradient on each, and so has a key head that several of them hold: these are
// summed over that group first.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parvl/comm/process_group.h"
#include "parvl/nn/param.h"
#include "parvl/train/gradient_sums.h"
#include "parvl/train/recipe.h"

namespace parvl {

// Parameters of one module with one learning rate and one weight decay, that are cut alike.
struct OptimGroupState {
  double lr = 0;
  double weight_decay = 0;
  std::vector<Param*> params;
  std::vector<int64_t> offsets;  // of each parameter in the flat tensors
  at::Tensor master, grad;       // flat; the parameters' tensors are views of these
  at::Tensor value;              // flat in the compute dtype; master itself when the dtypes agree
  at::Tensor moment1, moment2;   // AdamW; SGD with momentum uses moment1. Of the part that this rank updates
  at::Tensor updates;            // AdamW's count of updates, a float scalar on the device
  ProcessGroup* data = nullptr;  // the ranks with these parameters and other samples; null: none
  TensorParallel tensor;         // the ranks that the module is cut over
  ShardPart part;                // of each of these parameters; the whole: they are not cut
  bool counts = true;            // in the norm, on this rank of those that hold the same part
  // The part that this rank updates: all of it without ZeRO-1. The flat tensors are padded so that parts are equal.
  int64_t part_begin = 0, part_size = 0;
};

// Values of one parameter's state that this rank keeps.
struct StatePiece {
  const Param* param = nullptr;
  const char* state = "";  // moment1, moment2, or master where the values are 16-bit
  int64_t begin = 0;       // where they begin in the row-major order of this rank's part of the parameter
  at::Tensor values;       // flat; the optimizer's own memory
  bool counts = true;      // on this rank of those that keep the same values
};

// Where a parameter's gradient is summed, and how the state is kept. Which parameters are cut, `params` says.
struct OptimizerRanks {
  std::function<ProcessGroup*(Module)> data;  // null, or gives null: only here. Borrowed
  bool zero1 = false;
  // Whether two stages hold a parameter: on both it lies in flat tensors of its own, so that sums over ranks, whose
  // order may follow the place in a tensor, give both the same bits. Empty: none.
  std::function<bool(const Param&)> on_two_stages;
  // Whether a parameter's part counts on this rank of a data group, the same on all of these; and a sum over all ranks
  // of a scalar, in place. Empty: here alone.
  std::function<bool(const Param&)> counts;
  std::function<void(const at::Tensor&)> sum;
};

// Not thread-safe.
class Optimizer {
 public:
  // Decides which parameters train (recipe.freeze), groups them, and gives every parameter of `params` its tensors on
  // `device`: masters and gradients in float32 (float64 for `dtype` float64), values in `dtype`, uninitialised.
  // Parameters that share a tensor are one parameter that goes by all their names. A pattern of `freeze` or `groups`
  // that matches no parameter, or nothing left to train on any rank, is InvalidArgument.
  static absl::StatusOr<std::unique_ptr<Optimizer>> create(ParamTable& params, const Recipe& recipe, DType dtype,
                                                           at::Device device, const OptimizerRanks& ranks = {});

  // With ZeRO-1 and 16-bit values, once the parameters have their weights: from here on this rank keeps the masters of
  // its own part alone (the parameters' `master` is their value then). Until then the masters lie in the gradients'
  // memory. Else it changes nothing.
  void shard();
  // All of the optimizer's state that this rank keeps but the counts of steps. After `shard`; until tensors change.
  std::vector<StatePiece> state_pieces() const;

  void zero_grad();
  // The step adds nothing more to the gradients of parameters whose names start with `prefix`: on GPUs without ZeRO-1
  // their sums may begin. May be left out, also on some ranks only.
  void is_final(const std::string& prefix) {
    if (!ranks_.zero1) sums_->is_final(prefix);
  }
  // Sums the gradients over the tensor and data groups: every rank has all of its parameters', or with ZeRO-1 its own
  // part. All ranks call it.
  void reduce_grads();
  // All gradients on every rank also with ZeRO-1, to look at them. After reduce_grads, by all ranks.
  void gather_grads();
  // √Σ gradient², each element of the model once, as a scalar on the device (float64). After reduce_grads, by all
  // ranks.
  at::Tensor grad_norm() const;
  void scale_grads(double factor);
  // One update with learning rates times `lr_factor`, then the values are refreshed from the masters.
  void step(double lr_factor);
  // A step that had nothing to learn from: it counts for the schedule; weights, moments and their bias correction stay.
  void skip_step() { ++steps_done_; }
  // The values from the masters, where these are whole.
  void refresh_values();

  std::vector<OptimGroupState>& groups() { return groups_; }
  const std::vector<OptimGroupState>& groups() const { return groups_; }
  int64_t steps_done() const { return steps_done_; }
  int64_t updates_done() const { return updates_done_; }  // steps that were not skipped
  DType state_dtype() const { return state_dtype_; }      // of masters, gradients and moments
  at::Device device() const { return device_; }
  void set_progress(int64_t steps_done, int64_t updates_done);

 private:
  void share_values();
  static void sum_over_tensor_group(OptimGroupState& group);

  Optimizer(const OptimRecipe& recipe, const OptimizerRanks& ranks) : recipe_(recipe), ranks_(ranks) {}
  OptimRecipe recipe_;
  OptimizerRanks ranks_;
  ParamTable* params_ = nullptr;  // borrowed
  DType state_dtype_ = DType::kFloat32;
  bool masters_ = false;  // beside 16-bit values
  at::Device device_ = at::kCPU;
  std::vector<OptimGroupState> groups_;
  std::unique_ptr<GradientSums> sums_;  // of groups_
  int64_t steps_done_ = 0;
  int64_t updates_done_ = 0;
};

}  // namespace parvl
