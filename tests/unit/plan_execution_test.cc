// Predicted times of schedules: values worked out by hand, and what holds for any costs.
#include <gmock/gmock.h>
#include <rapidcheck/gtest.h>

#include <map>

#include "parvl/plan/pipeline/execution.h"
#include "tests/unit/pipeline_fixture.h"

namespace parvl {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;
using testing::HasSubstr;

// Costs as tables: [stage][micro batch]; transfers take the same each.
struct Costs {
  std::vector<std::vector<double>> forward, backward;
  double transfer = 0;
  std::vector<std::vector<double>> encode = {};  // [encoder][micro batch]; its backward takes twice as long
};

ActionSeconds seconds(const PipelineSchedule& schedule, const Costs& costs) {
  return [&schedule, &costs](int64_t rank, const Action& action) {
    const auto s = static_cast<size_t>(action.stage), m = static_cast<size_t>(action.microbatch);
    const auto e = static_cast<size_t>(schedule.ranks[static_cast<size_t>(rank)].encoder);
    switch (action.kind) {
      case ActionKind::kForward:
        return action.stage == kEncoderStage ? costs.encode[e][m] : costs.forward[s][m];
      case ActionKind::kBackward:
        return action.stage == kEncoderStage ? 2 * costs.encode[e][m] : costs.backward[s][m];
      case ActionKind::kSend:
      case ActionKind::kExchange:
        return costs.transfer;
      default:
        return 0.0;
    }
  };
}

Costs equal_costs(int64_t stages, int64_t microbatches, double forward, double backward, double transfer = 0) {
  const std::vector<double> f(static_cast<size_t>(microbatches), forward), b(f.size(), backward);
  return {std::vector(static_cast<size_t>(stages), f), std::vector(static_cast<size_t>(stages), b), transfer};
}

PipelineTimes times(const PipelineShape& shape, const Costs& costs, Sends sends = Sends::kPosted) {
  const PipelineSchedule schedule = *make_1f1b(shape);
  const absl::StatusOr<PipelineTimes> out = predict(schedule, seconds(schedule, costs), sends);
  EXPECT_TRUE(out.ok()) << out.status();
  return *out;
}

// (p − 1) / (m + p − 1), the published share, in both ways to send.
TEST(Prediction, EqualCostsHaveTheKnownBubble) {
  for (const Sends sends : {Sends::kPosted, Sends::kRendezvous}) {
    const PipelineTimes two = times(plain_shape(2, 4), equal_costs(2, 4, 1, 2), sends);
    EXPECT_DOUBLE_EQ(two.makespan, 15);
    EXPECT_DOUBLE_EQ(two.bubble_share(), 1.0 / 5);
    EXPECT_THAT(two.busy, ElementsAre(12, 12));
    for (int64_t p = 1; p <= 4; ++p) {
      for (int64_t m = 1; m <= 8; ++m) {
        const PipelineTimes t = times(plain_shape(p, m), equal_costs(p, m, 1, 2), sends);
        EXPECT_THAT(t.bubble_share(), DoubleNear(static_cast<double>(p - 1) / static_cast<double>(m + p - 1), 1e-12))
            << p << " stages, " << m << " micro batches";
      }
    }
  }
}

TEST(Prediction, OneMicrobatchGoesThereAndBack) {
  const PipelineTimes t = times(plain_shape(3, 1), {{{1}, {2}, {3}}, {{4}, {5}, {6}}, 0.5});
  EXPECT_DOUBLE_EQ(t.makespan, 21 + 4 * 0.5);
  EXPECT_THAT(t.busy, ElementsAre(5, 7, 9));
  EXPECT_NEAR(t.bubble_share(), 1 - 21.0 / 69, 1e-12);
}

// Rank 0: F0 0–1, F1 1–4, (gradient 0 at 6) B0 6–8, (gradient 1 at 12) B1 12–16.
// Rank 1: (output 0 at 1) F0 1–3, B0 3–6, (output 1 at 4) F1 6–7, B1 7–12.
TEST(Prediction, RaggedMicrobatches) {
  const Costs costs{{{1, 3}, {2, 1}}, {{2, 4}, {3, 5}}};
  const PipelineTimes t = times(plain_shape(2, 2), costs);
  EXPECT_DOUBLE_EQ(t.makespan, 16);
  EXPECT_THAT(t.busy, ElementsAre(10, 11));
  EXPECT_NEAR(t.bubble_share(), 1 - 21.0 / 32, 1e-12);
  const std::vector<ActionTime>& first = t.actions[0];  // F0 o0>1 F1 o1>1 g0<1 B0 -0 g1<1 B1 -1
  EXPECT_EQ(first[2].end, 4);
  EXPECT_EQ(first[4].end, 6);
  EXPECT_EQ(first[5].begin, 6);
  EXPECT_EQ(first[7].begin, 8);
  EXPECT_EQ(first[7].end, 12);
  // A rendezvous makes rank 0 keep output 1 until 6, when rank 1 takes it; it would have waited for gradient 0 anyway.
  EXPECT_DOUBLE_EQ(times(plain_shape(2, 2), costs, Sends::kRendezvous).makespan, 16);
}

// Both directions between two stages, 1 s each, at once where they are posted together.
// Posted: rank 1 has output 0 at 2, F0 2–3, B0 3–5; output 1 and gradient 0 cross at 5–6; F1 6–7, B1 7–9, gradient 1
// 9–10; rank 0: B0 6–8, B1 10–12.
// Rendezvous: output 1 at 5–6, then gradient 0 at 6–7; rank 1: F1 7–8, B1 8–10, gradient 1 10–11; rank 0: B1 11–13.
TEST(Prediction, TransfersOverlapOnlyWherePosted) {
  EXPECT_DOUBLE_EQ(times(plain_shape(2, 2), equal_costs(2, 2, 1, 2, 1)).makespan, 12);
  EXPECT_DOUBLE_EQ(times(plain_shape(2, 2), equal_costs(2, 2, 1, 2, 1), Sends::kRendezvous).makespan, 13);
}

// Stage 0 is frozen and quick, stage 1 slow: it is two micro batches ahead at most, one in the channel and one in hand.
TEST(Prediction, AFrozenStageDoesNotRunAhead) {
  PipelineShape shape = plain_shape(2, 4);
  shape.stage_trained = {false, true};
  const PipelineTimes t = times(shape, {{{1, 1, 1, 1}, {10, 10, 10, 10}}, {{0, 0, 0, 0}, {10, 10, 10, 10}}});
  // F0 o0>1 -0 F1 o1>1 -1 …; rank 1 takes output 1 at 21, output 2 at 41 and output 3 at 61.
  std::vector<double> begins;
  for (size_t i = 0; i < 12; i += 3) begins.push_back(t.actions[0][i].begin);
  EXPECT_THAT(begins, ElementsAre(0, 1, 2, 21));
  EXPECT_DOUBLE_EQ(t.makespan, 81);
}

// Encoding: rank 0 for 1 s, rank 1 for 3 s; the exchange 0.5 s; the pipeline 2 · (1 + 2) and twice 0.5 there and back;
// exchange; rank 1 goes backward for 6 s.
TEST(Prediction, AnEncoderOverAllRanksStandsBeforeAndAfter) {
  PipelineShape shape = plain_shape(2, 1);
  shape.encoder = EncoderPlace::kAllRanks;
  shape.encoder_trained = true;
  shape.microbatches[0].encoders = {0, 1};
  Costs costs = equal_costs(2, 1, 1, 2, 0.5);
  costs.encode = {{1}, {3}};
  const PipelineTimes t = times(shape, costs);
  EXPECT_DOUBLE_EQ(t.makespan, 3 + 0.5 + 6 + 1 + 0.5 + 6);
  EXPECT_THAT(t.busy, ElementsAre(3 + 3, 3 + 9));
}

TEST(Prediction, AScheduleThatStopsHasNoTimes) {
  PipelineSchedule schedule = *make_1f1b(plain_shape(2, 2));
  schedule.ranks[1].actions.pop_back();  // the last gradient
  for (const Sends sends : {Sends::kPosted, Sends::kRendezvous}) {
    EXPECT_THAT(predict(
                    schedule, [](int64_t, const Action&) { return 1.0; }, sends)
                    .status()
                    .message(),
                HasSubstr("rank 0 (stage 0) waits to receive the gradient of stage 1, micro batch 1, from rank 1"));
  }
  schedule = *make_1f1b(plain_shape(2, 1));
  schedule.ranks[0].actions.erase(schedule.ranks[0].actions.begin() + 2);  // what it receives
  for (const Sends sends : {Sends::kPosted, Sends::kRendezvous}) {
    EXPECT_THAT(predict(
                    schedule, [](int64_t, const Action&) { return 1.0; }, sends)
                    .status()
                    .message(),
                HasSubstr("waits to send the gradient of stage 1, micro batch 0, to rank 0, which has finished"));
  }
}

// Costs as a function of what acts, in sixty-fourths so that sums are exact.
ActionSeconds any_seconds(const PipelineSchedule& schedule) {
  std::map<std::pair<int64_t, Action>, double> table;
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (const Action& action : schedule.ranks[rank].actions) {
      const bool costs = action.kind != ActionKind::kReceive && action.kind != ActionKind::kRelease;
      table[{static_cast<int64_t>(rank), action}] = costs ? *rc::gen::inRange(0, 256) / 64.0 : 0;
    }
  }
  return [table](int64_t rank, const Action& action) { return table.at({rank, action}); };
}

// The longest chain of a micro batch: through all stages and back, with what it is sent.
double chain(const PipelineSchedule& schedule, int64_t m, const ActionSeconds& seconds) {
  double out = 0;
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    if (schedule.ranks[rank].stage == kEncoderStage) continue;
    for (const Action& action : schedule.ranks[rank].actions) {
      const bool to_encoder = action.is_message() && action.stage == 0 && action.payload == Payload::kGradient;
      if (action.microbatch == m && action.stage != kEncoderStage && !action.is_collective() && !to_encoder) {
        out += seconds(static_cast<int64_t>(rank), action);
      }
    }
  }
  return out;
}

RC_GTEST_PROP(Prediction, HoldsForAnyCosts, ()) {
  const PipelineSchedule schedule = *make_1f1b(any_shape(5, 6, 2));
  const ActionSeconds seconds = any_seconds(schedule);
  const PipelineTimes posted = *predict(schedule, seconds), meeting = *predict(schedule, seconds, Sends::kRendezvous);
  RC_LOG() << schedule.shape << "\n" << to_text(schedule);
  RC_ASSERT(posted.makespan <= meeting.makespan);  // waiting for less makes nothing later
  for (const PipelineTimes* t : {&posted, &meeting}) {
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      const std::vector<Action>& actions = schedule.ranks[rank].actions;
      double busy = 0, last = 0;
      for (size_t i = 0; i < actions.size(); ++i) {
        const ActionTime& time = t->actions[rank][i];
        RC_ASSERT(time.begin >= last);
        RC_ASSERT(time.end >=
                  time.begin +
                      (actions[i].kind == ActionKind::kReceive ? 0 : seconds(static_cast<int64_t>(rank), actions[i])));
        RC_ASSERT(time.end <= t->makespan);
        if (!actions[i].is_message() || t == &meeting) last = time.end;
        if (!actions[i].is_message() && !actions[i].is_collective()) busy += time.end - time.begin;
      }
      RC_ASSERT(busy == t->busy[rank]);
      RC_ASSERT(t->makespan >= busy);
    }
    for (size_t m = 0; m < schedule.shape.microbatches.size(); ++m) {
      RC_ASSERT(t->makespan >= chain(schedule, static_cast<int64_t>(m), seconds));
    }
    RC_ASSERT(t->bubble_share() >= 0 && t->bubble_share() <= 1);
  }
}

}  // namespace
}  // namespace parvl
