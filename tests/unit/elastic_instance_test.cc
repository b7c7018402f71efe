#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <optional>
#include <set>

#include "parvl/elastic/instance_lifecycle.h"

namespace parvl {
namespace {

using Do = InstanceAction::Kind;
using Kind = InstanceEvent::Kind;
using State = InstanceState;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<Do> kinds(const std::vector<InstanceAction>& actions) {
  std::vector<Do> out;
  for (const InstanceAction& action : actions) out.push_back(action.kind);
  return out;
}

class InstanceTest : public ::testing::Test {
 protected:
  InstanceTest() { EXPECT_THAT(kinds(instance_.start(0)), ElementsAre(Do::kStart)); }

  std::vector<Do> happens(Kind kind, double at_s, double step_s = 0) {
    return kinds(instance_.handle({kind, at_s, instance_.epoch(), step_s}));
  }
  void make_ready(double at_s) {
    EXPECT_THAT(happens(Kind::kHello, at_s), ElementsAre(Do::kAssign));
    EXPECT_THAT(happens(Kind::kLoaded, at_s), ElementsAre(Do::kWarm));
    EXPECT_THAT(happens(Kind::kWarmed, at_s), ElementsAre(Do::kOpen));
    EXPECT_EQ(instance_.state(), State::kReady);
  }
  InstanceLifecycle instance_;
};

TEST_F(InstanceTest, TakesNoRequestsBeforeItIsWarm) {
  EXPECT_EQ(instance_.state(), State::kStarting);
  EXPECT_THAT(happens(Kind::kWarmed, 1), IsEmpty()) << "it has not even been given its modules";
  EXPECT_THAT(happens(Kind::kHello, 1), ElementsAre(Do::kAssign));
  EXPECT_EQ(instance_.state(), State::kLoading);
  EXPECT_THAT(happens(Kind::kLoaded, 2), ElementsAre(Do::kWarm));
  EXPECT_EQ(instance_.state(), State::kWarming);
  EXPECT_THAT(happens(Kind::kWarmed, 3), ElementsAre(Do::kOpen));
  EXPECT_EQ(instance_.state(), State::kReady);
  EXPECT_THAT(happens(Kind::kWarmed, 3), IsEmpty());
}

TEST_F(InstanceTest, DrainsUntilNothingRuns) {
  make_ready(1);
  EXPECT_THAT(happens(Kind::kDrain, 2), ElementsAre(Do::kClose));
  EXPECT_THAT(happens(Kind::kDrain, 2), IsEmpty()) << "once is enough";
  EXPECT_THAT(happens(Kind::kIdle, 3), ElementsAre(Do::kRelease));
  EXPECT_THAT(happens(Kind::kExited, 4), ElementsAre(Do::kFence));
  EXPECT_EQ(instance_.state(), State::kGone);
  EXPECT_EQ(instance_.failures(), 0);
  EXPECT_THAT(happens(Kind::kTick, 1e6), IsEmpty());
}

TEST_F(InstanceTest, WhatIsNotFinishedWhenTheDrainIsOverMoves) {
  make_ready(1);
  happens(Kind::kDrain, 2);
  for (double at_s = 3; at_s < 32; ++at_s) EXPECT_THAT(happens(Kind::kAlive, at_s), IsEmpty());
  EXPECT_THAT(happens(Kind::kTick, 32), ElementsAre(Do::kMove));
  EXPECT_TRUE(instance_.finishes()) << "what nobody else can take stays";
  happens(Kind::kAlive, 34);
  EXPECT_THAT(happens(Kind::kTick, 36.9), IsEmpty());
  EXPECT_THAT(happens(Kind::kIdle, 36.9), ElementsAre(Do::kRelease));
  EXPECT_FALSE(instance_.finishes());
  EXPECT_THAT(happens(Kind::kTick, 46), IsEmpty()) << "it owes no more words";
  EXPECT_THAT(happens(Kind::kTick, 46.9), ElementsAre(Do::kFence, Do::kKill)) << "nothing is left there to move";
  EXPECT_EQ(instance_.state(), State::kGone);
}

TEST_F(InstanceTest, DrainedBeforeItIsReadyItJustGoes) {
  happens(Kind::kHello, 1);
  EXPECT_THAT(happens(Kind::kDrain, 2), ElementsAre(Do::kRelease));
  EXPECT_THAT(happens(Kind::kLoaded, 3), IsEmpty());
  EXPECT_THAT(happens(Kind::kExited, 3), ElementsAre(Do::kFence));
  EXPECT_EQ(instance_.state(), State::kGone);
}

TEST_F(InstanceTest, ADeadProcessIsFencedBeforeItsRequestsMove) {
  make_ready(1);
  EXPECT_THAT(happens(Kind::kExited, 2), ElementsAre(Do::kClose, Do::kFence, Do::kMove, Do::kKill));
  EXPECT_EQ(instance_.state(), State::kFailed);
  EXPECT_EQ(instance_.reason(), "its process ended");
  EXPECT_THAT(happens(Kind::kTick, 2.4), IsEmpty());
  EXPECT_THAT(happens(Kind::kTick, 2.5), ElementsAre(Do::kStart));
  EXPECT_EQ(instance_.epoch(), 2);
}

TEST_F(InstanceTest, OneThatSleptIsNotBelievedAfterwards) {
  make_ready(1);
  EXPECT_THAT(happens(Kind::kTick, 3.9), IsEmpty());
  EXPECT_THAT(happens(Kind::kTick, 4), ElementsAre(Do::kClose, Do::kFence, Do::kMove, Do::kKill));
  EXPECT_EQ(instance_.reason(), "nothing was heard of it");
  happens(Kind::kTick, 4.5);
  ASSERT_EQ(instance_.epoch(), 2);
  for (const Kind kind : {Kind::kAlive, Kind::kHello, Kind::kWarmed, Kind::kRefused, Kind::kExited}) {
    EXPECT_THAT(instance_.handle({kind, 5, 1}), IsEmpty());
  }
  EXPECT_EQ(instance_.stale_events(), 4) << "that the old process ended is no word of its own";
  EXPECT_EQ(instance_.state(), State::kStarting);
}

TEST_F(InstanceTest, AHungStepIsNoticedThoughItsProcessSpeaks) {
  make_ready(1);
  happens(Kind::kStepBegan, 2, 5);
  for (double at_s = 3; at_s < 7; ++at_s) EXPECT_THAT(happens(Kind::kAlive, at_s), IsEmpty());
  EXPECT_EQ(instance_.next_tick_s(), 7);
  EXPECT_THAT(happens(Kind::kTick, 7), ElementsAre(Do::kClose, Do::kFence, Do::kMove, Do::kKill));
  EXPECT_EQ(instance_.reason(), "a step took too long");
}

TEST_F(InstanceTest, AStepThatEndedHasNoDeadline) {
  make_ready(1);
  happens(Kind::kStepBegan, 2, 5);
  happens(Kind::kStepEnded, 6);
  EXPECT_EQ(instance_.next_tick_s(), 9);  // the silence
}

struct Limit {
  const char* name;
  std::vector<Kind> before;
  double limit_s;
  const char* reason;
};

TEST(Instance, EveryPhaseHasItsLimit) {
  for (const Limit& limit : {Limit{"starting", {}, 60, "its process did not speak in time"},
                             Limit{"loading", {Kind::kHello}, 1800, "its modules were not loaded in time"},
                             Limit{"warming", {Kind::kHello, Kind::kLoaded}, 300, "it was not warm in time"}}) {
    InstanceLifecycle instance;
    instance.start(0);
    for (const Kind kind : limit.before) instance.handle({kind, 0, 1});
    EXPECT_EQ(kInstanceStateNames[static_cast<size_t>(instance.state())], limit.name);
    for (double at_s = 1; at_s < limit.limit_s; ++at_s) {
      if (!limit.before.empty()) instance.handle({Kind::kAlive, at_s, 1});
      ASSERT_THAT(instance.handle({Kind::kTick, at_s}), IsEmpty()) << limit.name << " at " << at_s;
    }
    EXPECT_THAT(kinds(instance.handle({Kind::kTick, limit.limit_s})), ElementsAre(Do::kFence, Do::kKill)) << limit.name;
    EXPECT_EQ(instance.reason(), limit.reason);
  }
}

TEST(Instance, WaitsLongerAfterEachFailureUntilOneServedForAWhile) {
  InstanceLifecycle instance;
  instance.start(0);
  double now = 0;
  std::vector<double> waits;
  const auto fail_and_restart = [&] {
    instance.handle({Kind::kExited, now, instance.epoch()});
    waits.push_back(instance.next_tick_s() - now);
    now = instance.next_tick_s();
    EXPECT_THAT(kinds(instance.handle({Kind::kTick, now})), ElementsAre(Do::kStart));
  };
  for (int i = 0; i < 8; ++i) fail_and_restart();
  EXPECT_THAT(waits, ElementsAre(0.5, 1, 2, 4, 8, 16, 30, 30));
  for (const Kind kind : {Kind::kHello, Kind::kLoaded, Kind::kWarmed}) instance.handle({kind, now, instance.epoch()});
  for (int i = 0; i < 60; ++i) instance.handle({Kind::kAlive, ++now, instance.epoch()});
  waits.clear();
  fail_and_restart();
  EXPECT_THAT(waits, ElementsAre(0.5));
}

TEST(Instance, OneThatIsDrainedWhileItWaitsForItsRestartIsGone) {
  InstanceLifecycle instance;
  instance.start(0);
  instance.handle({Kind::kExited, 1, 1});
  EXPECT_THAT(instance.handle({Kind::kDrain, 1}), IsEmpty());
  EXPECT_EQ(instance.state(), State::kGone);
  EXPECT_THAT(instance.handle({Kind::kTick, 100}), IsEmpty());
}

// Whatever happens in whatever order: the promises that the rest of the system stands on.
RC_GTEST_PROP(InstanceProperty, KeepsItsPromises, ()) {
  InstanceLifecycle instance;
  bool open = false;    // requests may go there
  bool warmed = false;  // in this epoch
  std::set<int64_t> fenced;
  int64_t running = 1;  // the epoch of the process
  const auto check = [&](const std::vector<InstanceAction>& actions) {
    for (const auto& [kind, epoch, number] : actions) {
      RC_ASSERT(epoch == instance.epoch());
      if (kind == Do::kStart) {
        RC_ASSERT(epoch == running || fenced.contains(running));
        RC_ASSERT(!open);
        running = epoch;
        warmed = false;
        continue;
      }
      if (fenced.contains(epoch)) RC_ASSERT(kind == Do::kMove || kind == Do::kKill);
      if (kind == Do::kWarm) warmed = true;
      if (kind == Do::kOpen) {
        RC_ASSERT(warmed && !open);
        open = true;
      }
      if (kind == Do::kClose) {
        RC_ASSERT(open);
        open = false;
      }
      if (kind == Do::kRelease || kind == Do::kFence) RC_ASSERT(!open);
      if (kind == Do::kFence) RC_ASSERT(fenced.insert(epoch).second);
    }
    RC_ASSERT(open == (instance.state() == State::kReady));
  };
  check(instance.start(0));
  double now = 0;
  const auto length = *rc::gen::inRange(1, 80);
  for (int i = 0; i < length; ++i) {
    const bool gone = instance.state() == State::kGone;
    const auto kind = static_cast<Kind>(*rc::gen::weightedElement<int>(
        {{4, 0}, {4, 1}, {4, 2}, {4, 3}, {2, 4}, {2, 5}, {2, 6}, {1, 7}, {1, 8}, {1, 9}, {4, 10}}));
    const bool to_deadline = kind == Kind::kTick && *rc::gen::arbitrary<bool>() && instance.next_tick_s() < 1e9;
    now = to_deadline ? instance.next_tick_s() : now + *rc::gen::inRange(0, 3);
    const bool stale = *rc::gen::weightedElement<bool>({{4, false}, {1, true}});
    const int64_t epoch = stale ? instance.epoch() - 1 : instance.epoch();
    const State before = instance.state();
    const double next_tick_s = instance.next_tick_s();
    const auto actions = instance.handle({kind, now, epoch, 2});
    check(actions);
    if (gone) RC_ASSERT(actions.empty() && instance.state() == State::kGone);
    if (stale && kind != Kind::kTick && kind != Kind::kDrain) RC_ASSERT(actions.empty() && instance.state() == before);
    if (kind == Kind::kTick) RC_ASSERT(actions.empty() == (now < next_tick_s));
  }
}

}  // namespace
}  // namespace parvl
