#include <gtest/gtest.h>

#include "parvl/elastic/step_deadline.h"

namespace parvl {
namespace {

TEST(StepDeadline, AFirstStepHasItsOwn) {
  EXPECT_EQ(StepDeadline(60).limit_s(1), 60);
  EXPECT_EQ(StepDeadline(1).limit_s(1), 3) << "never less than that";
}

TEST(StepDeadline, ShortStepsHaveTheLeast) {
  StepDeadline deadline(60);
  for (int i = 0; i < 10; ++i) deadline.took(8, 0.02);
  EXPECT_EQ(deadline.limit_s(8), 3);
}

TEST(StepDeadline, LongOnesFollowTheirOwnSize) {
  StepDeadline deadline(60);
  for (int i = 0; i < 100; ++i) deadline.took(2048, 2);
  for (int i = 0; i < 100; ++i) deadline.took(1, 0.9);
  EXPECT_EQ(deadline.limit_s(2048), 10);
  EXPECT_EQ(deadline.limit_s(3000), 10) << "about the same";
  EXPECT_EQ(deadline.limit_s(1), 4.5);
}

TEST(StepDeadline, OneOutlierInAHundredDoesNotCount) {
  StepDeadline deadline(60);
  for (int i = 0; i < 99; ++i) deadline.took(1, 1);
  deadline.took(1, 50);
  EXPECT_EQ(deadline.limit_s(1), 5);
  deadline.took(1, 50);
  EXPECT_EQ(deadline.limit_s(1), 250) << "two do";
}

TEST(StepDeadline, AnUnknownSizeIsHeldToASmallerOneThatGrew) {
  StepDeadline deadline(60);
  for (int i = 0; i < 10; ++i) deadline.took(256, 1);
  EXPECT_EQ(deadline.limit_s(1024), 20);
  EXPECT_EQ(deadline.limit_s(1), 60) << "nothing smaller is known";
}

TEST(StepDeadline, OldStepsAreForgotten) {
  StepDeadline deadline(60, {.window = 8});
  for (int i = 0; i < 8; ++i) deadline.took(1, 10);
  for (int i = 0; i < 7; ++i) deadline.took(1, 1);
  EXPECT_EQ(deadline.limit_s(1), 50);
  deadline.took(1, 1);
  EXPECT_EQ(deadline.limit_s(1), 5);
}

}  // namespace
}  // namespace parvl
