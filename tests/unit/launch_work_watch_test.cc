// Work that is late: by its own limit, told once; and what a process that was stopped itself makes of it.
#include <gtest/gtest.h>

#include <future>

#include "parvl/launch/work_watch.h"

namespace parvl {
namespace {

TEST(WorkDeadlines, ALimitByWhatWorkOfItsSizeHasTaken) {
  WorkDeadlines works(StepDeadline(60));
  const WorkId first = works.begin(8, 100);
  EXPECT_EQ(works.next_s(), 160);
  works.end(first, 102);
  (void)works.begin(8, 200);
  EXPECT_EQ(works.next_s(), 210);  // five times as long
  (void)works.begin(16, 200);      // twice the size
  EXPECT_EQ(works.next_s(), 210);
  EXPECT_TRUE(works.look(209.9).empty());
  const auto late = works.look(210);
  ASSERT_EQ(late.size(), 1u);
  EXPECT_EQ(late[0].size, 8);
  EXPECT_EQ(late[0].limit_s, 10);
  EXPECT_TRUE(works.look(210).empty());
  EXPECT_EQ(works.next_s(), 220);
  EXPECT_EQ(works.look(220).size(), 1u);
  EXPECT_EQ(works.next_s(), std::numeric_limits<double>::infinity());
}

TEST(WorkDeadlines, NeverShorterThanTheLeast) {
  WorkDeadlines works(StepDeadline(60));
  works.end(works.begin(1, 0), 0.01);
  (void)works.begin(1, 10);
  EXPECT_EQ(works.next_s(), 13);
}

TEST(WorkDeadlines, WhatHasEndedIsNotLate) {
  WorkDeadlines works(StepDeadline(5));
  const WorkId one = works.begin(1, 0), two = works.begin(1, 1);
  works.end(one, 4);
  EXPECT_TRUE(works.look(5.5).empty());
  EXPECT_EQ(works.look(6).size(), 1u);
  works.end(two, 7);  // too late: no effect
  EXPECT_TRUE(works.look(100).empty());
}

// Its own process was stopped: it looks at 500 s for what it wanted to see at 10.
TEST(WorkDeadlines, TimeInWhichNobodyLookedDoesNotCount) {
  WorkDeadlines works(StepDeadline(10));
  (void)works.begin(1, 0);
  EXPECT_TRUE(works.look(500).empty());
  EXPECT_EQ(works.next_s(), 500);
  EXPECT_EQ(works.look(500.5).size(), 1u);
}

TEST(WorkWatch, TellsOfLateWorkAndOfNoOther) {
  const RealClock clock;
  std::promise<LateWork> told;
  WorkWatch watch(clock, StepDeadline(0, {.least_s = 0}), [&told](const LateWork& late) { told.set_value(late); });
  EXPECT_EQ((watch.begin(7), told.get_future().get().size), 7);
  std::atomic<int> others = 0;
  WorkWatch patient(clock, StepDeadline(1e9, {.least_s = 1e9}), [&others](const LateWork&) { ++others; });
  const WorkId endless = patient.begin(1);
  patient.end(patient.begin(2));
  patient.end(endless);
  EXPECT_EQ(others, 0);
}

}  // namespace
}  // namespace parvl
