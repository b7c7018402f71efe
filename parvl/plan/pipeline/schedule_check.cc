#include "parvl/plan/pipeline/schedule_check.h"

#include <algorithm>
#include <map>
#include <utility>

#include "parvl/plan/pipeline/execution.h"

namespace parvl {
namespace {

// An action that a rank must do once, and what must come before it there.
struct Need {
  Action action;
  std::vector<Action> after;
};

// What one rank needs, from the shape alone. A backward counts as its two halves.
class Needs {
 public:
  Needs(const PipelineSchedule& schedule, int64_t rank)
      : schedule_(schedule), shape_(schedule.shape), rank_(schedule.ranks[static_cast<size_t>(rank)]) {
    for (size_t m = 0; m < shape_.microbatches.size(); ++m) {
      const auto microbatch = static_cast<int64_t>(m);
      const bool encodes =
          std::count(at(microbatch).encoders.begin(), at(microbatch).encoders.end(), rank_.encoder) > 0;
      if (rank_.stage == kEncoderStage) {
        if (encodes) encoder_apart(microbatch);
      } else if (at(microbatch).replica == rank_.replica) {
        stage(microbatch);
        if (shape_.encoder == EncoderPlace::kAllRanks && !at(microbatch).encoders.empty()) {
          encoder_over_all(microbatch, encodes);
        }
      }
    }
    if (shape_.tied && shape_.stages > 1 && (rank_.stage == 0 || is_last()) && !backwards_.empty()) {
      add({ActionKind::kReduceTied, rank_.stage, -1}, backwards_);
    }
  }
  const std::vector<Need>& all() const { return all_; }

 private:
  const Microbatch& at(int64_t m) const { return shape_.microbatches[static_cast<size_t>(m)]; }
  bool is_last() const { return rank_.stage == shape_.stages - 1; }
  void add(const Action& action, std::vector<Action> after) { all_.push_back({action, std::move(after)}); }

  // The ranks that give this stage its input, or take its gradient.
  std::vector<int64_t> upstream(int64_t m) const {
    if (rank_.stage > 0) return {schedule_.rank_of(rank_.replica, rank_.stage - 1)};
    std::vector<int64_t> out;
    if (shape_.encoder != EncoderPlace::kOwnRanks) return out;
    for (const int64_t e : at(m).encoders) out.push_back(schedule_.encoder_rank(e));
    return out;
  }

  void stage(int64_t m) {
    const int64_t s = rank_.stage, below = is_last() ? -1 : schedule_.rank_of(rank_.replica, s + 1);
    const PieceBackward plan = stage_backward(shape_, s, m);
    const Action forward{ActionKind::kForward, s, m}, input{ActionKind::kBackwardInput, s, m},
        weight{ActionKind::kBackwardWeight, s, m};
    const Action sent{ActionKind::kSend, s, m, Payload::kOutput, below},
        gradient{ActionKind::kReceive, s, m, Payload::kGradient, below};
    std::vector<Action> inputs, before_release = {forward};
    for (const int64_t rank : upstream(m)) inputs.push_back({ActionKind::kReceive, s, m, Payload::kOutput, rank});
    for (const Action& receive : inputs) add(receive, {});
    if (s == 0 && shape_.encoder == EncoderPlace::kAllRanks && !at(m).encoders.empty()) {
      inputs.push_back({ActionKind::kExchange, kEncoderStage, m, Payload::kOutput});
    }
    add(forward, inputs);
    if (!is_last()) {
      add(sent, {forward});
      before_release.push_back(sent);
    }
    if (plan.keeps_graph()) {
      std::vector<Action> before_backward = {forward};
      if (!is_last()) {
        add(gradient, {sent});
        before_backward.push_back(gradient);
      }
      add(input, before_backward);
      add(weight, {input});
      before_release.push_back(weight);
      backwards_.push_back(weight);
    }
    if (plan.input_grad) {
      for (const int64_t rank : upstream(m)) add({ActionKind::kSend, s, m, Payload::kGradient, rank}, {input});
    }
    add({ActionKind::kRelease, s, m}, before_release);
  }

  void encoder(int64_t m, const Action& output, const Action& gradient) {
    const Action forward{ActionKind::kForward, kEncoderStage, m}, input{ActionKind::kBackwardInput, kEncoderStage, m},
        weight{ActionKind::kBackwardWeight, kEncoderStage, m};
    std::vector<Action> before_release = {forward, output};
    add(forward, {});
    if (shape_.encoder_trained) {
      add(input, {forward, gradient});
      add(weight, {input});
      before_release.push_back(weight);
    }
    add({ActionKind::kRelease, kEncoderStage, m}, before_release);
  }

  void encoder_apart(int64_t m) {
    const int64_t first = schedule_.rank_of(at(m).replica, 0);
    const Action output{ActionKind::kSend, kEncoderStage, m, Payload::kOutput, first},
        gradient{ActionKind::kReceive, kEncoderStage, m, Payload::kGradient, first};
    add(output, {{ActionKind::kForward, kEncoderStage, m}});
    if (shape_.encoder_trained) add(gradient, {output});
    encoder(m, output, gradient);
  }

  void encoder_over_all(int64_t m, bool encodes) {
    const Action output{ActionKind::kExchange, kEncoderStage, m, Payload::kOutput},
        gradient{ActionKind::kExchange, kEncoderStage, m, Payload::kGradient};
    std::vector<Action> before_output, before_gradient = {output};
    if (encodes) before_output.push_back({ActionKind::kForward, kEncoderStage, m});
    if (rank_.stage == 0) before_gradient.push_back({ActionKind::kBackwardInput, 0, m});
    add(output, before_output);
    if (shape_.encoder_trained) add(gradient, before_gradient);
    if (encodes) encoder(m, output, gradient);
  }

  const PipelineSchedule& schedule_;
  const PipelineShape& shape_;
  const RankSchedule& rank_;
  std::vector<Action> backwards_;
  std::vector<Need> all_;
};

// One rank's list against its needs.
class RankCheck {
 public:
  RankCheck(const PipelineSchedule& schedule, int64_t rank)
      : name_(absl::StrCat("rank ", rank)), rank_(schedule.ranks[static_cast<size_t>(rank)]), needs_(schedule, rank) {}

  absl::Status run() {
    for (const Action& action : rank_.actions) {
      if (action.kind == ActionKind::kBackward) {
        place(half(action, ActionKind::kBackwardInput));
        place(half(action, ActionKind::kBackwardWeight));
      } else {
        place(action);
      }
    }
    std::sort(places_.begin(), places_.end());
    for (size_t i = 1; i < places_.size(); ++i) {
      if (places_[i].first == places_[i - 1].first) {
        return failed(name_, " is to ", describe(places_[i].first), " twice");
      }
    }
    for (const Need& need : needs_.all()) PARVL_RETURN_IF_ERROR(check(need));
    if (places_.size() == needs_.all().size()) return check_live();
    for (const auto& [action, at] : places_) {
      const bool needed = std::any_of(needs_.all().begin(), needs_.all().end(),
                                      [&action = action](const Need& need) { return need.action == action; });
      if (!needed) return failed(name_, " is to ", describe(action), ", which nobody needs");
    }
    return failed(name_, " has more actions than it needs");
  }

 private:
  static Action half(Action action, ActionKind kind) {
    action.kind = kind;
    return action;
  }

  void place(const Action& action) { places_.emplace_back(action, places_.size()); }

  absl::StatusOr<size_t> place_of(const Action& action) const {
    const auto found = std::lower_bound(places_.begin(), places_.end(), std::pair(action, size_t{0}));
    if (found == places_.end() || found->first != action) return failed(name_, " does not ", describe(action));
    return found->second;
  }

  absl::Status check(const Need& need) const {
    PARVL_ASSIGN_OR_RETURN(const size_t here, place_of(need.action));
    for (const Action& earlier : need.after) {
      PARVL_ASSIGN_OR_RETURN(const size_t before, place_of(earlier));
      if (before > here) {
        return failed(name_, " is to ", describe(need.action), " before it is to ", describe(earlier));
      }
    }
    return absl::OkStatus();
  }

  absl::Status check_live() const {
    std::map<int64_t, int64_t> live;  // of a stage
    for (const Action& action : rank_.actions) {
      if (action.kind == ActionKind::kRelease) --live[action.stage];
      if (action.kind != ActionKind::kForward) continue;
      const int64_t bound = action.stage == kEncoderStage ? rank_.max_live_encoded : rank_.max_live;
      if (++live[action.stage] <= bound) continue;
      return failed(name_, " is to ", describe(action), " while it holds ", bound, " micro batches, its bound");
    }
    return absl::OkStatus();
  }

  std::string name_;
  const RankSchedule& rank_;
  Needs needs_;
  std::vector<std::pair<Action, size_t>> places_;  // sorted
};

}  // namespace

absl::Status check_progress(const PipelineSchedule& schedule) {
  return predict(
             schedule, [](int64_t, const Action&) { return 0.0; }, Sends::kRendezvous)
      .status();
}

absl::Status check_actions(const PipelineSchedule& schedule) {
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    PARVL_RETURN_IF_ERROR(RankCheck(schedule, static_cast<int64_t>(rank)).run());
  }
  return absl::OkStatus();
}

absl::Status check_schedule(const PipelineSchedule& schedule) {
  PARVL_RETURN_IF_ERROR(check_actions(schedule));
  return check_progress(schedule);
}

}  // namespace parvl
