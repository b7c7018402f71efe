// Schedules carried out on a toy model of scalars, in an order that rapidcheck chooses: whatever passes the checker
// gives every gradient as without a pipeline, never reads what is not there, and leaves nothing behind.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <deque>
#include <map>
#include <optional>

#include "parvl/base/rng.h"
#include "parvl/plan/pipeline/schedule_check.h"
#include "tests/unit/pipeline_fixture.h"

namespace parvl {
namespace {

// Stage s: y = w · x. Stage 0's x: a constant of the micro batch, and what its encoders give. Encoder e: v = u ·
// pixels. Loss: Σ y² / 2 over the micro batches. Small whole numbers, so that sums are exact in any order.
double weight(int64_t stage) { return stage == kEncoderStage ? 3 : stage % 2 == 0 ? -1 : 2; }
double constant(int64_t m) { return static_cast<double>(m + 1); }
double pixels(int64_t m, int64_t e) { return static_cast<double>(2 * m - e + 1); }

using StageGrads = std::map<std::pair<int64_t, int64_t>, double>;  // by replica and stage; the encoder's: replica −1

StageGrads expected_grads(const PipelineShape& shape) {
  StageGrads out;
  for (int64_t m = 0; m < static_cast<int64_t>(shape.microbatches.size()); ++m) {
    const Microbatch& microbatch = shape.microbatches[static_cast<size_t>(m)];
    std::vector<double> x = {constant(m)};
    for (const int64_t e : microbatch.encoders) x[0] += weight(kEncoderStage) * pixels(m, e);
    for (int64_t s = 0; s < shape.stages; ++s) x.push_back(x.back() * weight(s));
    double grad = x.back();
    for (int64_t s = shape.stages - 1; s >= 0; --s) {
      if (stage_backward(shape, s, m).keeps_graph()) out[{microbatch.replica, s}] += grad * x[static_cast<size_t>(s)];
      grad *= weight(s);
    }
    if (!shape.encoder_trained) continue;
    for (const int64_t e : microbatch.encoders) out[{-1, e}] += grad * pixels(m, e);
  }
  return out;
}

// One execution. Sends are buffered or meet their receiver; which rank goes next is up to `rng`.
class Toy {
 public:
  Toy(const PipelineSchedule& schedule, bool buffered, Rng rng)
      : schedule_(schedule), buffered_(buffered), rng_(rng), ranks_(schedule.ranks.size()) {}

  // False: it stopped, or read what was not there.
  bool run() {
    std::vector<size_t> able(ranks_.size());
    while (sound_) {
      able.clear();
      for (size_t r = 0; r < ranks_.size(); ++r) {
        if (ranks_[r].next < schedule_.ranks[r].actions.size() && possible(r)) able.push_back(r);
      }
      if (able.empty()) break;
      act(able[rng_.below(able.size())]);
    }
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].next < schedule_.ranks[r].actions.size() || !ranks_[r].held.empty()) return false;
    }
    for (const auto& [ends, values] : channels_) {
      if (!values.empty()) return false;
    }
    return sound_;
  }
  const StageGrads& grads() const { return grads_; }

 private:
  using Key = std::pair<int64_t, int64_t>;  // stage, micro batch
  struct Rank {
    size_t next = 0;
    std::map<Key, double> held;  // a forward's input, until it is released
    std::map<Key, double> outputs, input_grads;
    std::map<Key, double> inputs, output_grads;  // received; several encoders' add up
  };
  using Ends = std::pair<int64_t, int64_t>;

  const Action& action(size_t r) const { return schedule_.ranks[r].actions[ranks_[r].next]; }
  bool at(int64_t rank, const Action& wanted) const {
    const auto r = static_cast<size_t>(rank);
    return ranks_[r].next < schedule_.ranks[r].actions.size() && action(r) == wanted;
  }

  bool possible(size_t r) {
    const Action& here = action(r);
    if (here.is_collective()) {
      for (const int64_t member : schedule_.members(static_cast<int64_t>(r), here)) {
        Action there = here;
        if (here.kind == ActionKind::kReduceTied) there.stage = schedule_.ranks[static_cast<size_t>(member)].stage;
        if (!at(member, there)) return false;
      }
      return true;
    }
    if (here.kind == ActionKind::kSend && !buffered_) {
      const auto peer = static_cast<size_t>(here.peer);
      return ranks_[peer].next < schedule_.ranks[peer].actions.size() && action(peer).kind == ActionKind::kReceive &&
             action(peer).peer == static_cast<int64_t>(r) && channels_[{r, here.peer}].empty();
    }
    return here.kind != ActionKind::kReceive || !channels_[{here.peer, r}].empty();
  }

  double take(const std::map<Key, double>& from, const Key& key) {
    const auto found = from.find(key);
    sound_ = sound_ && found != from.end();
    return found == from.end() ? 0 : found->second;
  }

  void act(size_t r) {
    const Action here = action(r);
    Rank& rank = ranks_[r];
    const Key key{here.stage, here.microbatch};
    if (here.is_collective()) return collective(r, here);
    ++rank.next;
    switch (here.kind) {
      case ActionKind::kForward:
        return forward(r, here);
      case ActionKind::kBackward:
        return backward(r, here);
      case ActionKind::kRelease:
        sound_ = sound_ && rank.held.erase(key) == 1;
        break;
      case ActionKind::kSend:
        channels_[{r, here.peer}].push_back(
            take(here.payload == Payload::kOutput ? rank.outputs : rank.input_grads, key));
        break;
      default: {
        std::deque<double>& channel = channels_[{here.peer, r}];
        (here.payload == Payload::kOutput ? rank.inputs : rank.output_grads)[key] += channel.front();
        channel.pop_front();
      }
    }
  }

  void forward(size_t r, const Action& here) {
    Rank& rank = ranks_[r];
    const Key key{here.stage, here.microbatch};
    double x = 0;
    if (here.stage == kEncoderStage) {
      x = pixels(here.microbatch, schedule_.ranks[r].encoder);
    } else if (here.stage > 0) {
      x = take(rank.inputs, key);
    } else {
      x = constant(here.microbatch);
      if (!schedule_.shape.microbatches[static_cast<size_t>(here.microbatch)].encoders.empty()) {
        x += take(rank.inputs, key);
      }
    }
    rank.held[key] = x;
    rank.outputs[key] = weight(here.stage) * x;
    if (here.stage == schedule_.shape.stages - 1) rank.output_grads[key] = weight(here.stage) * x;
  }

  void backward(size_t r, const Action& here) {
    Rank& rank = ranks_[r];
    const Key key{here.stage, here.microbatch};
    const double grad = take(rank.output_grads, key);
    rank.input_grads[key] = grad * weight(here.stage);
    const RankSchedule& where = schedule_.ranks[r];
    const bool encoder = here.stage == kEncoderStage;
    grads_[encoder ? Key{-1, where.encoder} : Key{where.replica, here.stage}] += grad * take(rank.held, key);
  }

  // Exchanges carry sums here: to the first stage what all encoders gave, back the one gradient.
  void collective(size_t r, const Action& here) {
    const std::vector<int64_t> members = schedule_.members(static_cast<int64_t>(r), here);
    const Key encoded{kEncoderStage, here.microbatch}, first{0, here.microbatch};
    Rank& stage0 = ranks_[static_cast<size_t>(members.front())];
    for (const int64_t member : members) {
      Rank& rank = ranks_[static_cast<size_t>(member)];
      ++rank.next;
      if (here.kind != ActionKind::kExchange) continue;
      if (here.payload == Payload::kGradient) {
        rank.output_grads[encoded] = take(stage0.input_grads, first);
      } else if (rank.outputs.count(encoded)) {
        stage0.inputs[first] += rank.outputs[encoded];
      }
    }
  }

  const PipelineSchedule& schedule_;
  const bool buffered_;
  Rng rng_;
  std::vector<Rank> ranks_;
  std::map<Ends, std::deque<double>> channels_;
  StageGrads grads_;
  bool sound_ = true;
};

RC_GTEST_PROP(ScheduleRun, GradientsAreThoseWithoutAPipeline, ()) {
  const PipelineSchedule schedule = *make_1f1b(any_shape(5, 6, 2));
  RC_LOG() << schedule.shape << "\n" << to_text(schedule);
  for (const bool buffered : {false, true}) {
    for (uint64_t order = 0; order < 3; ++order) {
      Toy toy(schedule, buffered, Rng(*rc::gen::arbitrary<uint64_t>(), order));
      RC_ASSERT(toy.run());
      RC_ASSERT(toy.grads() == expected_grads(schedule.shape));
    }
  }
}

// Broken at random: what the checker lets pass is right nevertheless, and most is not let pass.
TEST(ScheduleRun, WhatPassesTheCheckerIsRight) {
  int64_t passed = 0, refused = 0;
  EXPECT_TRUE(rc::check([&] {
    using rc::gen::inRange;
    const PipelineSchedule whole = *make_1f1b(any_shape(4, 4, 1));
    for (int change = 0; change < 20; ++change) {
      PipelineSchedule schedule = whole;
      std::vector<Action>& actions = schedule.ranks[*inRange<size_t>(0, schedule.ranks.size())].actions;
      if (actions.size() < 2) continue;
      const size_t i = *inRange<size_t>(0, actions.size() - 1),
                   j = change % 2 == 0 ? i + 1 : *inRange<size_t>(i + 1, actions.size());
      std::swap(actions[i], actions[j]);
      if (!check_schedule(schedule).ok()) {
        ++refused;
        continue;
      }
      ++passed;
      RC_LOG() << schedule.shape << "\n" << to_text(schedule);
      Toy toy(schedule, false, Rng(*rc::gen::arbitrary<uint64_t>()));
      RC_ASSERT(toy.run());
      RC_ASSERT(toy.grads() == expected_grads(schedule.shape));
    }
  }));
  EXPECT_GT(passed, 20);
  EXPECT_GT(refused, passed);
}

}  // namespace
}  // namespace parvl
