#include <gtest/gtest.h>

#include <algorithm>

#include "parvl/sched/step_pace.h"

namespace parvl {
namespace {

constexpr double kLimit = 0.030 / StepPace::kAim;  // so that it aims at 30 ms

struct Machine {
  double base, rate;  // of a step, seconds; and of each token
  double seconds(int64_t tokens) const { return base + rate * static_cast<double>(tokens); }
};

int64_t settled(StepPace& pace, const Machine& machine, int steps = 60) {
  for (int i = 0; i < steps; ++i) pace.took(pace.tokens(), machine.seconds(pace.tokens()));
  return pace.tokens();
}

TEST(StepPace, ComesToWhatTakesTheTimeThatIsAskedForAndNeverBeyond) {
  for (const double base : {0.0, 0.002, 0.010, 0.025}) {
    for (const double rate : {0.00001, 0.0001, 0.001}) {
      const Machine machine{base, rate};
      StepPace pace(kLimit, 2048);
      EXPECT_EQ(pace.tokens(), 16);  // it begins where it does little harm
      const auto fits = static_cast<int64_t>((0.030 - base) / rate);
      const int64_t expected = std::clamp<int64_t>(fits, 16, 2048);
      int64_t before = 0;
      for (int i = 0; i < 300; ++i) {          // monotonically
        EXPECT_GE(pace.tokens() + 1, before);  // the one that rounding takes
        EXPECT_LE(pace.tokens(), expected);
        before = pace.tokens();
        pace.took(pace.tokens(), machine.seconds(pace.tokens()));
      }
      // The last of it is lost to rounding down: a change of less than a token.
      EXPECT_GE(machine.seconds(pace.tokens()) + 0.030 / static_cast<double>(pace.tokens()) + rate,
                std::min(0.030, machine.seconds(2048)))
          << base << " " << rate;
    }
  }
}

TEST(StepPace, FollowsAMachineThatBecomesSlowerOrFaster) {
  StepPace pace(kLimit, 2048);
  const Machine quick{0.010, 0.0001}, slow{0.020, 0.0002};
  EXPECT_NEAR(static_cast<double>(settled(pace, quick)), 200, 4);
  EXPECT_NEAR(static_cast<double>(settled(pace, slow)), 50, 4);
  EXPECT_NEAR(static_cast<double>(settled(pace, quick)), 200, 4);
}

TEST(StepPace, OneOddStepHalvesItAtMost) {
  StepPace pace(kLimit, 2048);
  const int64_t before = settled(pace, {0.010, 0.0001});
  pace.took(before, 100);
  EXPECT_EQ(pace.tokens(), before / 2);
}

TEST(StepPace, AStepWithFewerTokensSaysNothingAboutMore) {
  StepPace pace(kLimit, 2048);
  const int64_t before = settled(pace, {0.010, 0.0001});
  pace.took(3, 0.011);
  EXPECT_EQ(pace.tokens(), before);
  pace.took(before / 2, 0.060);  // but one that was slow with few says that many are too many
  EXPECT_EQ(pace.tokens(), before / 4);
}

TEST(StepPace, PromptsGoOnWhereEvenTheBaseTakesLonger) {
  StepPace pace(kLimit, 2048);
  EXPECT_EQ(settled(pace, {0.050, 0.001}), 16);
  StepPace few(kLimit, 7);
  EXPECT_EQ(settled(few, {0.050, 0.001}), 7);
}

TEST(StepPace, WithoutATimeItIsAllThatAStepTakes) {
  StepPace pace(0, 2048);
  pace.took(2048, 100);
  EXPECT_EQ(pace.tokens(), 2048);
}

}  // namespace
}  // namespace parvl
