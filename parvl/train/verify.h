// Whether a layout computes what one process computes: gradients, loss, and some optimizer steps.
#pragma once

#include <map>
#include <string>

#include "parvl/train/trainer.h"

namespace parvl {

// What a run computed, in float64.
struct VerifyRun {
  double loss = 0, grad_norm = 0;               // of the first batch that has something to learn
  std::map<std::string, at::Tensor> gradients;  // of it, by the parameters' global names
  std::vector<double> losses;                   // of each step
  std::map<std::string, at::Tensor> weights;    // after the steps
  absl::Status replicas;                        // whether the ranks then held the same values: expect_equal_values
};

// OK when the values that several ranks hold are the same bits on all of them: a module's on ranks with other samples,
// what is whole on tensor ranks, a tied embedding on two stages. Else Internal on all of these, naming the parameter
// and the ranks of the group that differ. All ranks call it; the values are in host memory.
absl::Status expect_equal_values(const Trainer& trainer);

// Trains `steps` steps of the recipe from its start, in memory; all ranks of the layout call it, and each gets the
// whole result. `recipe.train.dtype` as the caller wants it; nothing is saved or resumed.
absl::StatusOr<VerifyRun> run_steps(const Recipe& recipe, const TrainerEnvironment& environment, int64_t steps);

struct VerifyResult {
  double max_relative_error = 0;  // of the gradients: max|g − r| / max(max|r|, 1e-5 · the largest |r| of all)
  std::string parameter;          // that has it
  double loss_error = 0;          // relative, the largest of all steps
  double grad_norm_error = 0;     // relative
  double weight_error = 0;        // as max_relative_error, of the weights after the steps
};
// A gradient that one of them lacks, or of another shape, has the error 1.
VerifyResult compare(const VerifyRun& run, const VerifyRun& reference);

}  // namespace parvl
