#include "parvl/train/trainer_output.h"

#include <chrono>

namespace parvl {

namespace {
// A silence of 4 s is broken (see Progress), so at most 4.5 s pass without a sign.
constexpr std::chrono::milliseconds kLookEvery{500};
}  // namespace

RunOutput::RunOutput(const Clock& clock, const TrainRecipe& recipe, RunOutputOptions options)
    : clock_(clock), recipe_(recipe), options_(std::move(options)) {
  progress_.emplace(clock_, progress_options(0), options_.write);
  alive_ = std::thread([this] { keep_alive(); });
}

RunOutput::~RunOutput() { finish(); }

ProgressOptions RunOutput::progress_options(int64_t first_step) const {
  ProgressOptions options;
  options.total_steps = recipe_.steps;
  options.first_step = first_step;
  options.log_every = recipe_.log_every;
  options.terminal = options_.terminal;
  options.columns = options_.columns;
  return options;
}

void RunOutput::keep_alive() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!finished_) {
    changed_.wait_for(lock, kLookEvery);
    if (!finished_ && !activity_.empty()) progress_->working(activity_);
  }
}

absl::Status RunOutput::begin(int64_t first_step) {
  if (options_.events) {
    PARVL_ASSIGN_OR_RETURN(events_, EventWriter::create(recipe_.out, clock_.wall_seconds()));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  progress_.emplace(clock_, progress_options(first_step), options_.write);
  return absl::OkStatus();
}

void RunOutput::working(std::string_view what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  activity_ = what;
  progress_->working(what);
}

void RunOutput::line(std::string_view text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  progress_->line(text);
}

absl::Status RunOutput::step(const StepReport& report, const Json& more) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    progress_->step(report);
  }
  if (!is_logged(report.step)) return absl::OkStatus();
  std::vector<std::pair<std::string, double>> values = {
      {"train/loss", report.loss},
      {"train/grad_norm", report.grad_norm},
      {"train/lr", report.lr},
      {"train/tokens_per_second", report.tokens_per_second},
      {"train/memory_bytes", static_cast<double>(report.memory_bytes)}};
  if (report.mfu >= 0) values.emplace_back("train/mfu", report.mfu);
  Json event = {{"event", "step"}, {"step", report.step}};
  for (const auto& [name, value] : values) event[name.substr(6)] = value;
  event["memory_bytes"] = report.memory_bytes;
  event.update(more);
  record(event);
  return scalars(report.step, values);
}

absl::Status RunOutput::scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  return events_ == nullptr ? absl::OkStatus() : events_->scalars(step, clock_.wall_seconds(), values);
}

void RunOutput::record(const Json& event) {
  if (!options_.record) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  options_.record(event);
}

void RunOutput::finish() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_ = true;
    progress_->finish();
  }
  changed_.notify_all();
  if (alive_.joinable()) alive_.join();
}

}  // namespace parvl
