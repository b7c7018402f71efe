#include "parvl/sched/step_pace.h"

#include <algorithm>

namespace parvl {
namespace {

constexpr int64_t kLeast = 16;  // fewer cost a whole step's weights for next to nothing
constexpr double kMostChange = 2;

}  // namespace

StepPace::StepPace(double limit_s, int64_t most)
    : aim_s_(kAim * limit_s), most_(most), tokens_(limit_s > 0 ? std::min(kLeast, most) : most) {}

void StepPace::took(int64_t tokens, double seconds) {
  if (aim_s_ <= 0) return;
  const double change = std::clamp(aim_s_ / seconds, 1 / kMostChange, kMostChange);
  const int64_t fit = static_cast<int64_t>(static_cast<double>(tokens) * change);
  // One that was quick with fewer tokens than it might have had says nothing about more.
  if (change >= 1 && tokens < tokens_) return;
  const int64_t highest = change < 1 ? tokens_ : most_;
  tokens_ = std::clamp(fit, std::min(kLeast, highest), highest);
}

}  // namespace parvl
