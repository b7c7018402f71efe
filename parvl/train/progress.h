// What a training run shows while it works: a moving bar on a terminal, a line an interval elsewhere.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "parvl/base/clock.h"

namespace parvl {

// The figures of one step.
struct StepReport {
  int64_t step = 0;  // steps done, from 1
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  double tokens_per_second = 0;
  int64_t memory_bytes = 0;
  double mfu = -1;  // share of the device's peak; < 0: not known
};

// "step 120/6000  loss 0.1234  grad_norm 1.23  lr 1.0e-03  tokens/s 12345  memory 512 MiB  eta 3m20s"
std::string format_step(const StepReport& report, int64_t total_steps, double eta_seconds);
// "[=====>    ]  50%  " and so on, at most `width` columns. A negative eta is left out.
std::string format_bar(const StepReport& report, int64_t total_steps, double eta_seconds, int width);
std::string format_duration(double seconds);  // 8s, 3m20s, 2h05m

struct ProgressOptions {
  int64_t total_steps = 0;
  int64_t first_step = 0;  // steps that an earlier run did
  int64_t log_every = 10;
  bool terminal = false;
  int columns = 80;
};

// Not thread-safe. Borrows the clock. `write` gets text with its line ends; on a terminal a bar starts with '\r'.
class Progress {
 public:
  Progress(const Clock& clock, ProgressOptions options, std::function<void(std::string_view)> write);

  // After every step: moves the bar at most ten times a second, or writes a line where `step` is a multiple of
  // log_every or the last. The line of a step that is due is always written; in between, a silence over 4 s is broken
  // by a short line.
  void step(const StepReport& report);
  // Call it often during anything long ("loading the model"): writes only when nothing was shown for 4 s.
  void working(std::string_view what);
  // A line of its own, above the bar.
  void line(std::string_view text);
  // Leaves the cursor on a fresh line. Called at the end; safe to call twice.
  void finish();

 private:
  double eta(int64_t step) const;
  void show(std::string_view text);
  void draw_bar(std::string text);
  bool silent_for(double seconds) const;

  const Clock& clock_;
  ProgressOptions options_;
  std::function<void(std::string_view)> write_;
  int64_t start_ns_;
  int64_t rate_start_ns_ = 0;  // when the first step was done: it carries one-time costs, so the rate leaves it out
  int64_t rate_start_step_ = -1;
  int64_t last_shown_ns_;
  int bar_width_ = 0;  // columns of the bar that stands there
};

}  // namespace parvl
