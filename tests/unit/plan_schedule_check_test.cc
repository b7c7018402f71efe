// The checker of schedules: every schedule of up to 4 stages and 8 micro batches passes it; its one greedy execution
// decides as all executions together do; broken schedules are named.
#include <gmock/gmock.h>
#include <rapidcheck/gtest.h>

#include <set>
#include <unordered_set>

#include "parvl/plan/pipeline/schedule_check.h"
#include "tests/unit/pipeline_fixture.h"

namespace parvl {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(ScheduleCheck, EveryScheduleOfFourStagesAndEightMicrobatchesPasses) {
  int64_t schedules = 0;
  for (int64_t stages = 1; stages <= 4; ++stages) {
    for (int64_t microbatches = 1; microbatches <= 8; ++microbatches) {
      for_each_shape(stages, microbatches, [&](const PipelineShape& shape) {
        const absl::StatusOr<PipelineSchedule> schedule = make_1f1b(shape);
        ASSERT_TRUE(schedule.ok()) << schedule.status();
        ASSERT_EQ(check_schedule(*schedule), absl::OkStatus()) << shape << "\n" << to_text(*schedule);
        // The bounds that 1F1B promises: min(micro batches, stages − stage), and less where nothing is kept.
        for (const RankSchedule& rank : schedule->ranks) {
          ASSERT_LE(rank.max_live, rank.stage == kEncoderStage ? 0 : std::min(microbatches, stages - rank.stage));
          ASSERT_LE(rank.max_live_encoded, rank.stage == kEncoderStage ? stages + 1 : microbatches);
        }
        ++schedules;
      });
    }
  }
  RecordProperty("schedules", static_cast<int>(schedules));
  EXPECT_GT(schedules, 10'000);
}

RC_GTEST_PROP(ScheduleCheck, SeveralReplicasAndAnySizesPass, ()) {
  const PipelineShape shape = any_shape(9, 12, 3);
  const absl::StatusOr<PipelineSchedule> schedule = make_1f1b(shape);
  RC_ASSERT(schedule.ok());
  RC_LOG() << shape << "\n" << to_text(*schedule);
  RC_ASSERT(check_schedule(*schedule) == absl::OkStatus());
}

// All executions of a schedule under rendezvous, step by step: the states in which nothing is possible any more.
class AllExecutions {
 public:
  explicit AllExecutions(const PipelineSchedule& schedule) : schedule_(schedule) {
    std::vector<std::vector<size_t>> open = {std::vector<size_t>(schedule.ranks.size(), 0)};
    std::set<std::vector<size_t>> seen = {open[0]};
    while (!open.empty() && seen.size() < kMostStates) {
      const std::vector<size_t> at = open.back();
      open.pop_back();
      const std::vector<std::vector<size_t>> next = steps(at);
      if (next.empty()) ends_.insert(at);
      for (const auto& state : next) {
        if (seen.insert(state).second) open.push_back(state);
      }
    }
    states_ = seen.size();
  }
  static constexpr size_t kMostStates = 20'000;
  bool whole() const { return states_ < kMostStates; }  // false: there were too many to explore
  size_t states() const { return states_; }
  size_t number_of_ends() const { return ends_.size(); }
  bool completes() const {
    for (size_t r = 0; r < schedule_.ranks.size(); ++r) {
      if (ends_.begin()->at(r) != schedule_.ranks[r].actions.size()) return false;
    }
    return true;
  }

 private:
  const Action* action(const std::vector<size_t>& at, int64_t rank) const {
    const auto r = static_cast<size_t>(rank);
    return at[r] < schedule_.ranks[r].actions.size() ? &schedule_.ranks[r].actions[at[r]] : nullptr;
  }

  std::vector<std::vector<size_t>> steps(const std::vector<size_t>& at) const {
    std::vector<std::vector<size_t>> out;
    const auto take = [&](const std::vector<int64_t>& ranks) {
      out.push_back(at);
      for (const int64_t rank : ranks) ++out.back()[static_cast<size_t>(rank)];
    };
    for (int64_t r = 0; r < static_cast<int64_t>(at.size()); ++r) {
      const Action* const here = action(at, r);
      if (here == nullptr || here->kind == ActionKind::kReceive) continue;
      if (here->kind == ActionKind::kSend) {
        const Action* const there = action(at, here->peer);
        if (there != nullptr && there->kind == ActionKind::kReceive && there->peer == r &&
            there->microbatch == here->microbatch && there->payload == here->payload) {
          take({r, here->peer});
        }
      } else if (here->is_collective()) {
        const std::vector<int64_t> members = schedule_.members(r, *here);
        const bool all = std::all_of(members.begin(), members.end(), [&](int64_t member) {
          const Action* const there = action(at, member);
          return there != nullptr && there->kind == here->kind && there->microbatch == here->microbatch &&
                 there->payload == here->payload;
        });
        if (all && members.front() == r) take(members);
      } else {
        take({r});
      }
    }
    return out;
  }

  const PipelineSchedule& schedule_;
  std::set<std::vector<size_t>> ends_;
  size_t states_ = 0;
};

// Some change of one rank's list: two actions swapped, one moved, one dropped, one doubled.
void mutate(PipelineSchedule& schedule) {
  using rc::gen::inRange;
  std::vector<Action>& actions = schedule.ranks[*inRange<size_t>(0, schedule.ranks.size())].actions;
  if (actions.empty()) return;
  const size_t i = *inRange<size_t>(0, actions.size()), j = *inRange<size_t>(0, actions.size());
  const Action action = actions[i];
  switch (*inRange(0, 4)) {
    case 0:
      std::swap(actions[i], actions[j]);
      break;
    case 1:
      actions.erase(actions.begin() + static_cast<int64_t>(i));
      actions.insert(actions.begin() + static_cast<int64_t>(std::min(j, actions.size())), action);
      break;
    case 2:
      actions.erase(actions.begin() + static_cast<int64_t>(i));
      break;
    default:
      actions.insert(actions.begin() + static_cast<int64_t>(j), action);
  }
}

// One rank's second call of a collective must not meet the others' first, which they have only just left.
TEST(ScheduleCheck, ACollectiveThatOneRankCallsTwiceIsStuck) {
  PipelineShape shape;
  shape.stages = 3;
  shape.microbatches.resize(1);
  shape.tied = true;
  const PipelineSchedule schedule = *make_1f1b(shape);
  ASSERT_TRUE(check_progress(schedule).ok());
  int tried = 0;
  for (size_t r = 0; r < schedule.ranks.size(); ++r) {
    const std::vector<Action>& actions = schedule.ranks[r].actions;
    const auto found = std::find_if(actions.begin(), actions.end(), [](const Action& a) { return a.is_collective(); });
    if (found == actions.end()) continue;
    for (size_t at = 0; at <= actions.size(); ++at, ++tried) {
      PipelineSchedule twice = schedule;
      std::vector<Action>& changed = twice.ranks[r].actions;
      changed.insert(changed.begin() + static_cast<int64_t>(at), *found);
      EXPECT_FALSE(check_progress(twice).ok()) << to_text(twice);
    }
  }
  EXPECT_GT(tried, 10);
}

TEST(ScheduleCheck, OneExecutionDecidesForAllOfThem) {
  int64_t completed = 0, stuck = 0;
  size_t most = 0;
  const auto compare = [&](const PipelineSchedule& schedule) {
    const AllExecutions all(schedule);
    if (!all.whole()) return;
    RC_LOG() << schedule.shape << "\n" << to_text(schedule) << check_progress(schedule);
    RC_ASSERT(all.number_of_ends() == size_t{1});
    RC_ASSERT(all.completes() == check_progress(schedule).ok());
    all.completes() ? ++completed : ++stuck;
    most = std::max(most, all.states());
  };
  EXPECT_TRUE(rc::check([&] {
    const PipelineSchedule schedule = *make_1f1b(any_shape(4, 3, 2));
    compare(schedule);
    for (const int changes : {1, 1, 2, 3}) {
      PipelineSchedule broken = schedule;
      for (int i = 0; i < changes; ++i) mutate(broken);
      compare(broken);
    }
  }));
  // Neither answer is the only one, and there were interleavings to explore.
  EXPECT_GT(completed, 100);
  EXPECT_GT(stuck, 15);
  EXPECT_GT(most, 500u);
}

TEST(ScheduleCheck, OneExecutionDecidesForFourStages) {
  for (int64_t microbatches = 1; microbatches <= 8; ++microbatches) {
    PipelineShape shape = plain_shape(4, microbatches);
    shape.encoder = EncoderPlace::kAllRanks;
    shape.encoder_trained = true;
    for (int64_t m = 0; m < microbatches; m += 2) {
      shape.microbatches[static_cast<size_t>(m)].encoders = some_encoders(m, 4);
    }
    const PipelineSchedule schedule = *make_1f1b(shape);
    const AllExecutions all(schedule);
    ASSERT_TRUE(all.whole());
    EXPECT_EQ(all.number_of_ends(), 1u);
    EXPECT_TRUE(all.completes());
    EXPECT_GT(all.states(), static_cast<size_t>(20 * microbatches));
  }
}

// A trained encoder on two ranks of its own (3 and 4) before three stages.
PipelineSchedule with_encoder() {
  PipelineShape shape = plain_shape(3, 4);
  shape.encoder = EncoderPlace::kOwnRanks;
  shape.encoder_ranks = 2;
  shape.encoder_trained = shape.tied = true;
  for (int64_t m = 0; m < 4; ++m) shape.microbatches[static_cast<size_t>(m)].encoders = some_encoders(m, 2);
  return *make_1f1b(shape);
}

size_t find(const PipelineSchedule& schedule, size_t rank, const std::string& what) {
  const std::vector<Action>& actions = schedule.ranks[rank].actions;
  for (size_t i = 0; i < actions.size(); ++i) {
    if (describe(actions[i]) == what) return i;
  }
  ADD_FAILURE() << "rank " << rank << " does not " << what << "\n" << to_text(schedule);
  return 0;
}

std::string after_swap(size_t rank, const std::string& one, const std::string& other,
                       PipelineSchedule schedule = *make_1f1b(plain_shape(3, 4))) {
  EXPECT_EQ(check_schedule(schedule), absl::OkStatus());
  std::vector<Action>& actions = schedule.ranks[rank].actions;
  std::swap(actions[find(schedule, rank, one)], actions[find(schedule, rank, other)]);
  return std::string(check_schedule(schedule).message());
}

std::string after_drop(size_t rank, const std::string& what, PipelineSchedule schedule) {
  std::vector<Action>& actions = schedule.ranks[rank].actions;
  actions.erase(actions.begin() + static_cast<int64_t>(find(schedule, rank, what)));
  EXPECT_THAT(check_actions(schedule).message(), AllOf(HasSubstr(absl::StrCat("rank ", rank)), HasSubstr(what)));
  return std::string(check_progress(schedule).message());
}

// So ranks of the LLM need to know no other replica's samples.
TEST(ScheduleCheck, AReplicasListsDependOnItsOwnMicrobatchesAlone) {
  EXPECT_TRUE(rc::check([] {
    const PipelineShape all = any_shape(4, 6, 3);
    const PipelineSchedule whole = *make_1f1b(all);
    for (int64_t replica = 0; replica < all.replicas; ++replica) {
      PipelineShape own = all;
      own.microbatches.clear();
      std::vector<int64_t> numbers;  // in the whole step
      for (size_t m = 0; m < all.microbatches.size(); ++m) {
        if (all.microbatches[m].replica != replica) continue;
        own.microbatches.push_back(all.microbatches[m]);
        numbers.push_back(static_cast<int64_t>(m));
      }
      const PipelineSchedule alone = *make_1f1b(own);
      for (int64_t stage = 0; stage < all.stages; ++stage) {
        const auto rank = static_cast<size_t>(whole.rank_of(replica, stage));
        std::vector<Action> renumbered = alone.ranks[rank].actions;
        for (Action& action : renumbered) {
          if (action.microbatch >= 0) action.microbatch = numbers[static_cast<size_t>(action.microbatch)];
        }
        RC_ASSERT(renumbered == whole.ranks[rank].actions);
      }
    }
  }));
}

TEST(ScheduleCheck, TwoSendsThatWaitForEachOtherAreACircle) {
  EXPECT_EQ(after_swap(1, "receive the output of stage 0, micro batch 2, from rank 0",
                       "send the gradient of stage 1, micro batch 0, to rank 0"),
            "a circle of waits: rank 0 (stage 0) waits to send the output of stage 0, micro batch 2, to rank 1; rank 1 "
            "(stage 1) waits to send the gradient of stage 1, micro batch 0, to rank 0");
  // Every rank's own order is right there, and here.
  EXPECT_EQ(
      after_swap(3, "receive the gradient of stage 0, micro batch 0, from rank 0",
                 "send the output of the encoder, micro batch 2, to rank 0", with_encoder()),
      "a circle of waits: rank 0 (stage 0) waits to receive the output of the encoder, micro batch 2, from rank 3; "
      "rank 3 (encoder 0) waits to receive the gradient of stage 0, micro batch 0, from rank 0");
}

TEST(ScheduleCheck, ReceivesInAnotherOrderAreNamed) {
  EXPECT_EQ(
      after_swap(1, "receive the output of stage 0, micro batch 0, from rank 0",
                 "receive the output of stage 0, micro batch 1, from rank 0"),
      "rank 1 is to run the forward of stage 1, micro batch 0 before it is to receive the output of stage 0, micro "
      "batch 0, from rank 0");
  // The rank's own order is right, but not that of its sender.
  PipelineSchedule schedule = *make_1f1b(plain_shape(2, 3));
  std::vector<Action>& actions = schedule.ranks[0].actions;
  const auto of = [](int64_t m) { return absl::StrCat("send the output of stage 0, micro batch ", m, ", to rank 1"); };
  std::swap(actions[find(schedule, 0, of(0))], actions[find(schedule, 0, of(1))]);
  EXPECT_EQ(check_progress(schedule).message(),
            "rank 1 (stage 1) is to receive the output of stage 0, micro batch 0, from rank 0, but rank 0 (stage 0) is "
            "to send the output of stage 0, micro batch 1, to rank 1");
}

TEST(ScheduleCheck, EveryDroppedActionIsNamed) {
  for (const PipelineSchedule& schedule : {*make_1f1b(plain_shape(4, 3)), with_encoder()}) {
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      for (const Action& action : schedule.ranks[rank].actions) {
        std::string what = describe(action);
        if (action.kind == ActionKind::kBackward) what.replace(what.find("backward"), 8, "backward of the input");
        PipelineSchedule broken = schedule;
        std::erase(broken.ranks[rank].actions, action);
        EXPECT_THAT(check_schedule(broken).message(), AllOf(HasSubstr(absl::StrCat("rank ", rank)), HasSubstr(what)));
        EXPECT_EQ(check_progress(broken).ok(), !action.is_message() && !action.is_collective()) << what;
      }
    }
  }
}

TEST(ScheduleCheck, ADroppedSendEndsInAWaitForNobody) {
  EXPECT_EQ(
      after_drop(1, "send the gradient of stage 1, micro batch 2, to rank 0", *make_1f1b(plain_shape(2, 3))),
      "rank 0 (stage 0) waits to receive the gradient of stage 1, micro batch 2, from rank 1, which has finished");
  EXPECT_EQ(after_drop(0, "sum the tied embedding's gradient", with_encoder()),
            "rank 2 (stage 2) waits to sum the tied embedding's gradient, for rank 0, which has finished");
}

// Every swap of two neighbours that belong to one micro batch, and every swap of the same action of two micro batches.
TEST(ScheduleCheck, SwapsWithinAMicrobatchAndBetweenTwoAreFound) {
  int64_t swaps = 0;
  const PipelineSchedule schedule = with_encoder();
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const std::vector<Action>& actions = schedule.ranks[rank].actions;
    for (size_t i = 0; i < actions.size(); ++i) {
      for (size_t j = i + 1; j < actions.size(); ++j) {
        const Action &a = actions[i], &b = actions[j];
        const bool alike = a.kind == b.kind && a.payload == b.payload && a.microbatch != b.microbatch &&
                           a.kind != ActionKind::kRelease;
        const bool steps = a.microbatch == b.microbatch && a.kind != b.kind && a.kind != ActionKind::kRelease &&
                           b.kind != ActionKind::kRelease;
        if (!alike && !steps) continue;
        PipelineSchedule broken = schedule;
        std::swap(broken.ranks[rank].actions[i], broken.ranks[rank].actions[j]);
        EXPECT_FALSE(check_schedule(broken).ok()) << describe(a) << " with " << describe(b);
        ++swaps;
      }
    }
  }
  EXPECT_GT(swaps, 150);
}

TEST(ScheduleCheck, HoldingMoreThanTheBoundIsNamed) {
  // Two forwards before the first backward, where one stage keeps one micro batch.
  PipelineSchedule schedule = *make_1f1b(plain_shape(1, 2));
  ASSERT_EQ(to_text(schedule), "0: F0 B0 -0 F1 B1 -1\n");
  std::vector<Action>& actions = schedule.ranks[0].actions;
  std::rotate(actions.begin() + 1, actions.begin() + 3, actions.begin() + 4);
  EXPECT_EQ(check_schedule(schedule).message(),
            "rank 0 is to run the forward of stage 0, micro batch 1 while it holds 1 micro batches, its bound");
}

TEST(ScheduleCheck, WhatNobodyNeedsIsNamed) {
  PipelineSchedule schedule = *make_1f1b(plain_shape(2, 1));
  schedule.ranks[0].actions.push_back({ActionKind::kForward, 1, 0});
  EXPECT_EQ(check_schedule(schedule).message(),
            "rank 0 is to run the forward of stage 1, micro batch 0, which nobody needs");
  schedule = *make_1f1b(plain_shape(2, 1));
  schedule.ranks[0].actions.push_back({ActionKind::kForward, 0, 0});
  EXPECT_EQ(check_schedule(schedule).message(), "rank 0 is to run the forward of stage 0, micro batch 0 twice");
}

// A backward in its two halves is as good as one.
TEST(ScheduleCheck, BackwardsMayBeSplit) {
  PipelineSchedule schedule = *make_1f1b(plain_shape(2, 2));
  std::vector<Action>& actions = schedule.ranks[1].actions;
  const size_t at = find(schedule, 1, "run the backward of stage 1, micro batch 0");
  actions[at].kind = ActionKind::kBackwardInput;
  Action weight = actions[at];
  weight.kind = ActionKind::kBackwardWeight;
  actions.insert(actions.begin() + static_cast<int64_t>(at) + 1, weight);
  EXPECT_EQ(check_schedule(schedule), absl::OkStatus());
  std::swap(actions[at], actions[at + 1]);
  EXPECT_THAT(check_schedule(schedule).message(), HasSubstr("run the backward of the weights of stage 1"));
}

}  // namespace
}  // namespace parvl
