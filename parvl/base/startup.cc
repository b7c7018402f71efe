#include "parvl/base/startup.h"

#include <absl/strings/str_cat.h>

#include <chrono>
#include <cmath>
#include <utility>

namespace parvl {
namespace {

std::string seconds_text(double seconds) { return absl::StrCat(std::round(seconds * 10) / 10, " s"); }

std::string gigabytes_text(double bytes) { return absl::StrCat(std::round(bytes / 1e7) / 100, " GB"); }

std::string mebibytes_text(int64_t bytes) { return absl::StrCat((bytes + (1 << 19)) >> 20); }

constexpr double kRated = 0.1;  // seconds; of a shorter phase a rate says nothing

}  // namespace

Startup::Startup(const Clock& clock, Tell tell)
    : clock_(clock), tell_(std::move(tell)), start_(clock.now_seconds()), phase_start_(start_), last_told_(start_) {}

void Startup::begin(const std::string& phase) {
  std::lock_guard lock(mutex_);
  const double now = clock_.now_seconds();
  end_phase(now);
  phases_.push_back({phase});
  phase_start_ = now;
  done_ = total_ = 0;
}

void Startup::progress(int64_t done_bytes, int64_t total_bytes) {
  std::lock_guard lock(mutex_);
  done_ = done_bytes;
  total_ = total_bytes;
  tell_if_silent();
}

void Startup::beat() {
  std::lock_guard lock(mutex_);
  tell_if_silent();
}

void Startup::tell_if_silent() {
  const double now = clock_.now_seconds();
  if (finished_ || phases_.empty() || now - last_told_ < kSilence) return;
  last_told_ = now;
  std::string line = absl::StrCat("starting: ", phases_.back().name);
  if (total_ > 0) {
    absl::StrAppend(&line, " ", mebibytes_text(done_), " of ", mebibytes_text(total_), " MiB (", 100 * done_ / total_,
                    " %)");
  }
  tell_(absl::StrCat(line, ", ", seconds_text(now - start_)));
}

void Startup::end_phase(double now) {
  if (phases_.empty()) return;
  phases_.back().seconds = now - phase_start_;
  phases_.back().bytes = done_;
}

void Startup::finish() {
  std::lock_guard lock(mutex_);
  if (finished_) return;
  finished_ = true;
  const double now = clock_.now_seconds();
  end_phase(now);
  std::string line = absl::StrCat("ready after ", seconds_text(now - start_));
  for (size_t i = 0; i < phases_.size(); ++i) {
    const Phase& phase = phases_[i];
    absl::StrAppend(&line, i == 0 ? ": " : ", ", phase.name, " ", seconds_text(phase.seconds));
    if (phase.bytes > 0 && phase.seconds >= kRated) {
      absl::StrAppend(&line, " at ", gigabytes_text(static_cast<double>(phase.bytes) / phase.seconds), "/s");
    }
  }
  tell_(line);
}

Heartbeat::Heartbeat(std::shared_ptr<Startup> startup)
    : thread_([this, startup = std::move(startup)] {
        std::unique_lock lock(mutex_);
        while (!stopped_.wait_for(lock, std::chrono::milliseconds(500), [this] { return stopping_; })) startup->beat();
      }) {}

Heartbeat::~Heartbeat() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

}  // namespace parvl
