#include "parvl/train/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace parvl {
namespace {

constexpr double kSilenceSeconds = 4.0;
constexpr double kRedrawSeconds = 0.1;

template <typename... Args>
std::string format(const char* pattern, Args... args) {
  char buffer[256];
  const int length = std::snprintf(buffer, sizeof(buffer), pattern, args...);
  return std::string(buffer, static_cast<size_t>(std::clamp(length, 0, static_cast<int>(sizeof(buffer)) - 1)));
}

}  // namespace

std::string format_duration(double seconds) {
  const auto whole = static_cast<int64_t>(std::llround(std::clamp(seconds, 0.0, 1e9)));
  if (whole < 60) return format("%llds", static_cast<long long>(whole));
  if (whole < 3600)
    return format("%lldm%02llds", static_cast<long long>(whole / 60), static_cast<long long>(whole % 60));
  return format("%lldh%02lldm", static_cast<long long>(whole / 3600), static_cast<long long>(whole / 60 % 60));
}

std::string format_step(const StepReport& report, int64_t total_steps, double eta_seconds) {
  std::string line =
      format("step %lld/%lld  loss %.4f  grad_norm %.3g  lr %.3e  tokens/s %.0f  memory %lld MiB",
             static_cast<long long>(report.step), static_cast<long long>(total_steps), report.loss, report.grad_norm,
             report.lr, report.tokens_per_second, static_cast<long long>(report.memory_bytes >> 20));
  if (report.mfu >= 0) line += format("  mfu %.1f%%", 100 * report.mfu);
  if (eta_seconds >= 0) line += "  eta " + format_duration(eta_seconds);
  return line;
}

std::string format_bar(const StepReport& report, int64_t total_steps, double eta_seconds, int width) {
  const double share =
      std::clamp(static_cast<double>(report.step) / static_cast<double>(std::max<int64_t>(1, total_steps)), 0.0, 1.0);
  std::string figures = format(" %lld/%lld  loss %.4f  %.0f tok/s", static_cast<long long>(report.step),
                               static_cast<long long>(total_steps), report.loss, report.tokens_per_second);
  if (eta_seconds >= 0) figures += "  eta " + format_duration(eta_seconds);
  const int cells = std::min(30, width - 2 - static_cast<int>(figures.size()));
  if (cells < 5) return figures.substr(1, static_cast<size_t>(std::max(width, 0)));
  const int full = static_cast<int>(share * cells);
  std::string bar(static_cast<size_t>(full), '=');
  if (full < cells) bar += '>';
  bar.resize(static_cast<size_t>(cells), ' ');
  return "[" + bar + "]" + figures;
}

Progress::Progress(const Clock& clock, ProgressOptions options, std::function<void(std::string_view)> write)
    : clock_(clock),
      options_(options),
      write_(std::move(write)),
      start_ns_(clock.now_ns()),
      last_shown_ns_(start_ns_) {}

bool Progress::silent_for(double seconds) const {
  return static_cast<double>(clock_.now_ns() - last_shown_ns_) * 1e-9 >= seconds;
}

double Progress::eta(int64_t step) const {
  const int64_t done = step - rate_start_step_;
  if (rate_start_step_ < 0 || done <= 0) return -1;
  const double seconds = static_cast<double>(clock_.now_ns() - rate_start_ns_) * 1e-9;
  return seconds / static_cast<double>(done) * static_cast<double>(options_.total_steps - step);
}

void Progress::show(std::string_view text) {
  write_(text);
  last_shown_ns_ = clock_.now_ns();
}

void Progress::draw_bar(std::string text) {
  const int width = static_cast<int>(text.size());
  if (width < bar_width_) text.append(static_cast<size_t>(bar_width_ - width), ' ');  // wipe what the old bar leaves
  bar_width_ = width;
  show("\r" + text);
}

void Progress::step(const StepReport& report) {
  const double eta_seconds = eta(report.step);
  if (rate_start_step_ < 0) {
    rate_start_step_ = report.step;
    rate_start_ns_ = clock_.now_ns();
  }
  const bool last = report.step >= options_.total_steps;
  if (options_.terminal) {
    const bool first = report.step <= options_.first_step + 1;
    if (first || last || silent_for(kRedrawSeconds)) {
      draw_bar(format_bar(report, options_.total_steps, eta_seconds, options_.columns - 1));
    }
  } else if (last || report.step % options_.log_every == 0) {
    show(format_step(report, options_.total_steps, eta_seconds) + "\n");
  } else if (silent_for(kSilenceSeconds)) {
    show(format("step %lld/%lld  loss %.4f\n", static_cast<long long>(report.step),
                static_cast<long long>(options_.total_steps), report.loss));
  }
}

void Progress::working(std::string_view what) {
  if (!silent_for(kSilenceSeconds)) return;
  const double seconds = static_cast<double>(clock_.now_ns() - start_ns_) * 1e-9;
  line(std::string(what) + " ... " + format_duration(seconds));
}

void Progress::line(std::string_view text) {
  std::string out(text);
  if (bar_width_ > 0) {
    if (static_cast<int>(out.size()) < bar_width_) out.append(static_cast<size_t>(bar_width_) - out.size(), ' ');
    out = "\r" + out;
    bar_width_ = 0;  // the next step draws the bar below
  }
  show(out + "\n");
}

void Progress::finish() {
  if (bar_width_ > 0) show("\n");
  bar_width_ = 0;
}

}  // namespace parvl
