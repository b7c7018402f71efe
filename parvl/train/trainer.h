// One training run: data, model, optimizer, checkpoints, log.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parvl/base/clock.h"
#include "parvl/models/packing.h"
#include "parvl/nn/param.h"
#include "parvl/train/data.h"
#include "parvl/train/optimizer.h"
#include "parvl/train/recipe.h"

namespace parvl {

struct StepResult {
  double loss = 0;       // mean cross-entropy over the assistant tokens of the global batch; 0 when there are none
  double grad_norm = 0;  // before clipping
  int64_t tokens = 0;    // of all sequences
  int64_t targets = 0;
  double flops = 0;
};

// What the trainer needs from outside; borrowed, must outlive the run.
struct TrainerEnvironment {
  const Clock* clock = nullptr;
  std::string base_dir;                      // of relative data paths: the recipe's folder
  std::function<bool()> stop_requested;      // asked after every step; true: save and leave
  std::function<void(std::string_view)> write;  // progress text
  bool terminal = false;
  int columns = 80;
};

// A batch's sequences as the model reads them. Borrows the prompts' pixels.
std::vector<SequenceInput> to_sequences(const std::vector<Prompt>& prompts, size_t begin, size_t end);

// Not thread-safe.
class Trainer {
 public:
  static absl::StatusOr<std::unique_ptr<Trainer>> create(const Recipe& recipe, TrainerEnvironment environment);
  ~Trainer();

  // To the last step, or until stop_requested. The last step done is always saved, also when stopped. A loss or gradient
  // that is not finite ends the run before it reaches the weights.
  absl::Status run();

 private:
  Trainer(const Recipe& recipe, TrainerEnvironment environment);
  absl::Status set_up();
  absl::Status load_model_and_data();
  absl::Status resume();
  absl::Status train_loop();
  absl::StatusOr<StepResult> train_step(const GlobalBatch& batch);
  absl::Status after_step(const StepResult& result, double seconds);
  absl::Status save();
  absl::Status evaluate();
  std::string identity() const;

  Recipe recipe_;
  TrainerEnvironment env_;
  DType dtype_ = DType::kFloat32;
  at::Device device_ = at::kCPU;
  std::shared_ptr<const PromptBuilder> prompts_;
  std::shared_ptr<const Dataset> train_set_, eval_set_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Optimizer> optimizer_;
  struct Output;  // progress and event file
  std::unique_ptr<Output> output_;
  int64_t saved_step_ = -1;
};

}  // namespace parvl
