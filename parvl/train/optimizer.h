// AdamW and SGD over flat memory: the trained parameters of one group (same learning rate and weight decay) lie one
// after another, so a step is a few kernels whatever the number of parameters, and sharding it later cuts one tensor.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parvl/nn/param.h"
#include "parvl/train/recipe.h"

namespace parvl {

// Parameters of one module with one learning rate and one weight decay.
struct OptimGroupState {
  double lr = 0;
  double weight_decay = 0;
  std::vector<Param*> params;
  std::vector<int64_t> offsets;  // of each parameter in the flat tensors
  at::Tensor master, grad;       // flat; the parameters' tensors are views of these
  at::Tensor value;              // flat in the compute dtype; master itself when the dtypes agree
  at::Tensor moment1, moment2;   // AdamW; SGD with momentum uses moment1
  at::Tensor updates;            // AdamW's count of updates, a float scalar on the device
};

// Not thread-safe.
class Optimizer {
 public:
  // Decides which parameters train (recipe.freeze), groups them, and gives every parameter of `params` its tensors on
  // `device`: masters and gradients in float32 (float64 for `dtype` float64), values in `dtype`, uninitialised.
  // Parameters that share a tensor are one parameter that goes by all their names. A pattern of `freeze` or `groups`
  // that matches no parameter, or nothing left to train, is InvalidArgument.
  static absl::StatusOr<std::unique_ptr<Optimizer>> create(ParamTable& params, const Recipe& recipe, DType dtype,
                                                           at::Device device);

  void zero_grad();
  // √Σ gradient², each element once, as a scalar on the device (float64).
  at::Tensor grad_norm() const;
  // Scales all gradients by `factor` (a scalar on the device).
  void scale_grads(const at::Tensor& factor);
  // One update with learning rates times `lr_factor`, then the values are refreshed from the masters.
  void step(double lr_factor);
  // A step that had nothing to learn from: it counts for the schedule; weights, moments and their bias correction stay.
  void skip_step() { ++steps_done_; }
  void refresh_values();

  std::vector<OptimGroupState>& groups() { return groups_; }
  const std::vector<OptimGroupState>& groups() const { return groups_; }
  int64_t steps_done() const { return steps_done_; }
  int64_t updates_done() const { return updates_done_; }  // steps that were not skipped
  void set_progress(int64_t steps_done, int64_t updates_done);

 private:
  explicit Optimizer(const OptimRecipe& recipe) : recipe_(recipe) {}
  OptimRecipe recipe_;
  std::vector<OptimGroupState> groups_;
  int64_t steps_done_ = 0;
  int64_t updates_done_ = 0;
};

}  // namespace parvl
