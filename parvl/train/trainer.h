// One training run: data, model, optimizer, checkpoints, log.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parvl/base/clock.h"
#include "parvl/base/json.h"
#include "parvl/models/packing.h"
#include "parvl/train/checkpoint_folder.h"
#include "parvl/train/checkpointer.h"
#include "parvl/train/data.h"
#include "parvl/train/optimizer.h"
#include "parvl/train/pipeline_run.h"
#include "parvl/train/recipe.h"
#include "parvl/train/run_ranks.h"

namespace parvl {

class ImageCache;
class RunOutput;

struct StepResult {
  double loss = 0;       // mean cross-entropy over the assistant tokens of the global batch; 0 when there are none
  double grad_norm = 0;  // before clipping
  int64_t tokens = 0;    // of all sequences
  int64_t targets = 0;
  double flops = 0;
};

// What the trainer needs from outside; borrowed, must outlive the run.
struct TrainerEnvironment {
  const Clock* clock = nullptr;                 // thread-safe
  std::string base_dir;                         // of relative data paths: the recipe's folder
  std::function<bool()> stop_requested;         // asked after every step; true: save and leave
  std::function<void(std::string_view)> write;  // progress text; may come from another thread
  std::function<void(const Json&)>
      record;  // an object an event (step, saved, eval, resumed), for machines; may be empty
  bool terminal = false;
  int columns = 80;
  int loader_threads = 0;                        // that decode images; 0: half of the cores. Changes no result
  int64_t local_rank = 0;                        // which GPU of its machine this rank takes
  Communicator* communicator = nullptr;          // to the run's other ranks; null: there are none
  CheckOptions checks;                           // of their group calls; the clock is the one above
  std::vector<ActionRecord>* actions = nullptr;  // every action of this rank's pipeline is added, for measurements
};

// Samples as the model reads them. Borrows the prompts' pixels.
SequenceInput to_sequence(const Prompt& prompt);
std::vector<SequenceInput> to_sequences(const std::vector<Prompt>& prompts, size_t begin, size_t end);
// The encoder group of each image of a sequence, in the order of its images. `by_image`: as in GlobalBatch.
std::vector<int64_t> encoders_of(const Prompt& prompt, const std::vector<int64_t>& by_image);

// Not thread-safe. With several ranks each has a Trainer of its own, and all make the same calls.
class Trainer {
 public:
  static absl::StatusOr<std::unique_ptr<Trainer>> create(const Recipe& recipe, TrainerEnvironment environment);
  ~Trainer();

  // To the last step, or until stop_requested. The last step done is always saved, also when stopped, when a later
  // step's sample is bad, or, on one rank, when a later step fails otherwise (no memory), unless the weights may be
  // half updated. A loss or gradient that is not finite ends the run before it reaches the weights; nothing is saved
  // then.
  absl::Status run();

  // One optimizer step on one global batch, of which `batch` is this rank's share; what `run` repeats. A batch without
  // targets only counts.
  absl::StatusOr<StepResult> train_step(const GlobalBatch& batch);
  // The part of it before the update: loss, and in main_grad the gradients of the whole global batch (with ZeRO-1 only
  // of this rank's part), not clipped. Nothing is computed for a batch without targets.
  absl::StatusOr<StepResult> compute_gradients(const GlobalBatch& batch);
  // The rest of it: refuses what is not finite, clips, updates.
  absl::Status update(const StepResult& result);
  // Batches from the optimizer's step on.
  std::unique_ptr<BatchLoader> make_loader() const;
  const Model& model() const { return *model_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  Optimizer& optimizer() { return *optimizer_; }
  const RunRanks& ranks() const { return *ranks_; }

 private:
  Trainer(const Recipe& recipe, TrainerEnvironment environment);
  absl::Status set_up();
  // Forward and backward of the batch's micro batches: the loss, which counts where RunRanks::counts_loss.
  at::Tensor run_micro_batches(const GlobalBatch& batch, StepResult& result);
  absl::Status load_model_and_data();
  absl::Status connect(const ModelSpec& spec);
  absl::Status agree_on_writer();
  absl::Status agree_on_device();
  absl::Status check_eval_set();
  absl::Status resume();
  absl::Status check_together(const std::string& dir) const;
  std::string way_out(const std::vector<int64_t>& steps) const;
  absl::Status train_loop();
  absl::Status save_the_rest(const absl::Status& ended);
  absl::Status next_step(BatchLoader& loader);
  void warn_of_no_targets();
  absl::Status after_step(const StepResult& result, const std::vector<int64_t>& samples, double seconds);
  absl::Status save();
  absl::Status evaluate();
  absl::Status evaluate_here();
  bool stopping() const { return env_.stop_requested && env_.stop_requested(); }
  absl::StatusOr<bool> all_stopping() const;

  Recipe recipe_;
  TrainerEnvironment env_;
  DType dtype_ = DType::kFloat32;
  at::Device device_ = at::kCPU;
  std::unique_ptr<OutputLock> lock_;
  std::unique_ptr<RunOutput> output_;
  std::unique_ptr<Communicator> gpus_;  // the run's ranks by their GPUs; null: on the CPU, or alone
  std::unique_ptr<RunRanks> ranks_;     // its groups are those of gpus_, or the environment's communicator
  std::shared_ptr<const PromptBuilder> prompts_;
  std::shared_ptr<const Dataset> train_set_, eval_set_;
  std::unique_ptr<ImageCache> eval_images_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Optimizer> optimizer_;
  Json identity_;
  int64_t run_ = 0;          // see CheckpointContents
  uint64_t writer_ = 0;      // likewise
  int64_t saved_step_ = -1;  // the newest step that a checkpoint of this run holds
  // False where going on from the weights makes no sense: half updated, or their next numbers are not finite.
  bool worth_saving_ = true;
  bool all_are_here_ = false;  // after an error: all ranks know of it, and none waits or is gone
  bool warned_of_no_targets_ = false;
  // Sums since the last logged step.
  double interval_seconds_ = 0, interval_flops_ = 0;
  int64_t interval_tokens_ = 0;
};

}  // namespace parvl
