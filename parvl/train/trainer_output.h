// What a training run shows and records: progress text, TensorBoard events, and lines for machines.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "parvl/base/clock.h"
#include "parvl/base/json.h"
#include "parvl/train/progress.h"
#include "parvl/train/recipe.h"
#include "parvl/train/tensorboard.h"

namespace parvl {

struct RunOutputOptions {
  std::function<void(std::string_view)> write;  // progress text
  std::function<void(const Json&)> record;      // one object an event, for machines; may be empty
  bool terminal = false;
  int columns = 80;
  bool events = true;  // whether there is a TensorBoard file
};

// Calls `write` and `record` one at a time, `write` also from a thread of its own that breaks a long silence, so that
// no single long operation (loading, a slow step, saving) leaves the user without a sign of life. The methods are for
// the training thread. The clock must be thread-safe.
class RunOutput {
 public:
  RunOutput(const Clock& clock, const TrainRecipe& recipe, RunOutputOptions options);
  ~RunOutput();

  // Training begins after `first_step` steps: opens the event file.
  absl::Status begin(int64_t first_step);
  // What goes on from now on, for the sign of life.
  void working(std::string_view what);
  void line(std::string_view text);
  // After every step. A logged one (a multiple of log_every, or the last) goes to the event file and to `record`, which
  // also gets `more`.
  absl::Status step(const StepReport& report, const Json& more);
  // Figures beside the steps, under names like "eval/loss".
  absl::Status scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values);
  void record(const Json& event);
  bool is_logged(int64_t step) const { return step % recipe_.log_every == 0 || step == recipe_.steps; }
  void finish();  // leaves the cursor on a fresh line; safe to call twice

 private:
  ProgressOptions progress_options(int64_t first_step) const;
  void keep_alive();

  const Clock& clock_;
  const TrainRecipe recipe_;
  const RunOutputOptions options_;
  std::unique_ptr<EventWriter> events_;
  std::mutex mutex_;  // over all below
  std::condition_variable changed_;
  std::optional<Progress> progress_;
  std::string activity_;
  bool finished_ = false;
  std::thread alive_;
};

}  // namespace parvl
