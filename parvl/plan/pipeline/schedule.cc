#include "parvl/plan/pipeline/schedule.h"

#include <absl/strings/str_join.h>

#include <algorithm>
#include <utility>

namespace parvl {
namespace {

bool holds(const Microbatch& microbatch, int64_t encoder) {
  return std::find(microbatch.encoders.begin(), microbatch.encoders.end(), encoder) != microbatch.encoders.end();
}

absl::Status check_encoders(const PipelineShape& shape, const Microbatch& microbatch) {
  const int64_t encoders = shape.encoder == EncoderPlace::kOwnRanks   ? shape.encoder_ranks
                           : shape.encoder == EncoderPlace::kAllRanks ? shape.stages
                                                                      : 0;
  std::vector<int64_t> sorted = microbatch.encoders;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] < 0 || sorted[i] >= encoders || (i > 0 && sorted[i] == sorted[i - 1])) {
      return invalid("a micro batch's images lie on encoder rank ", sorted[i], "; there are ", encoders,
                     ", each named once");
    }
  }
  return absl::OkStatus();
}

absl::Status check_shape(const PipelineShape& shape) {
  if (shape.stages < 1 || shape.replicas < 1) return invalid("a pipeline has a stage and a replica at least");
  if ((shape.encoder == EncoderPlace::kOwnRanks) != (shape.encoder_ranks > 0)) {
    return invalid("an encoder on its own ranks needs a rank, and no other has one; found ", shape.encoder_ranks);
  }
  if (!shape.stage_trained.empty() && static_cast<int64_t>(shape.stage_trained.size()) != shape.stages) {
    return invalid("the freeze plan has ", shape.stage_trained.size(), " stages; the pipeline has ", shape.stages);
  }
  if (shape.tied && !shape.stage_trained.empty() && !(shape.stage_trained.front() && shape.stage_trained.back())) {
    return invalid("a tied embedding that is trained is trained in the first and in the last stage");
  }
  for (const Microbatch& microbatch : shape.microbatches) {
    if (microbatch.replica < 0 || microbatch.replica >= shape.replicas) {
      return invalid("a micro batch of replica ", microbatch.replica, "; there are ", shape.replicas);
    }
    PARVL_RETURN_IF_ERROR(check_encoders(shape, microbatch));
  }
  return absl::OkStatus();
}

// One rank's list.
class Builder {
 public:
  Builder(const PipelineSchedule& schedule, RankSchedule& out)
      : schedule_(schedule), shape_(schedule.shape), out_(out) {
    for (const Microbatch& microbatch : shape_.microbatches) {
      const auto at = static_cast<size_t>(microbatch.replica);
      of_replica_.resize(std::max(of_replica_.size(), static_cast<size_t>(shape_.replicas)));
      of_replica_[at].push_back(static_cast<int64_t>(&microbatch - shape_.microbatches.data()));
    }
    of_replica_.resize(static_cast<size_t>(shape_.replicas));
  }

  void stage() {
    const std::vector<int64_t>& mine = of_replica_[static_cast<size_t>(out_.replica)];
    const int64_t count = static_cast<int64_t>(mine.size()), ahead = shape_.stages - 1 - out_.stage;
    if (shape_.encoder == EncoderPlace::kAllRanks) encode_all(mine);
    bool graph = false;
    for (int64_t slot = 0; slot < count + ahead; ++slot) {
      if (slot < count) forward(mine[static_cast<size_t>(slot)]);
      if (slot >= ahead) backward(mine[static_cast<size_t>(slot - ahead)]);
    }
    for (const int64_t m : mine) graph = graph || stage_backward(shape_, out_.stage, m).keeps_graph();
    send_gradient();
    out_.max_live = std::min(count, graph ? ahead + 1 : 1);
    const bool ends = out_.stage == 0 || out_.stage == shape_.stages - 1;
    if (shape_.tied && shape_.stages > 1 && ends && count > 0) act({ActionKind::kReduceTied, out_.stage, -1});
    if (shape_.encoder == EncoderPlace::kAllRanks && shape_.encoder_trained) encode_all_backward(mine);
  }

  // The replicas in turn: each of them sees one stage before its first.
  void encoder() {
    size_t longest = 0;
    for (const auto& mine : of_replica_) longest = std::max(longest, mine.size());
    const auto ahead = static_cast<size_t>(shape_.stages);
    int64_t held = 0;
    for (size_t slot = 0; slot < longest + ahead; ++slot) {
      for (const auto& mine : of_replica_) {
        if (slot < mine.size() && encodes(mine[slot])) {
          encode(mine[slot]);
          ++held;
        }
        if (slot >= ahead && slot - ahead < mine.size() && encodes(mine[slot - ahead])) {
          encode_backward(mine[slot - ahead]);
        }
      }
    }
    out_.max_live_encoded = std::min(held, shape_.encoder_trained ? shape_.stages * shape_.replicas + 1 : int64_t{1});
  }

 private:
  const Microbatch& at(int64_t m) const { return shape_.microbatches[static_cast<size_t>(m)]; }
  bool encodes(int64_t m) const { return holds(at(m), out_.encoder); }
  void act(const Action& action) { out_.actions.push_back(action); }
  int64_t neighbour(int64_t steps) const { return schedule_.rank_of(out_.replica, out_.stage + steps); }

  void forward(int64_t m) {
    if (out_.stage > 0) {
      act({ActionKind::kReceive, out_.stage, m, Payload::kOutput, neighbour(-1)});
    } else if (shape_.encoder == EncoderPlace::kOwnRanks) {
      for (const int64_t e : at(m).encoders) {
        act({ActionKind::kReceive, 0, m, Payload::kOutput, schedule_.encoder_rank(e)});
      }
    }
    send_gradient();
    act({ActionKind::kForward, out_.stage, m});
    if (out_.stage + 1 < shape_.stages) act({ActionKind::kSend, out_.stage, m, Payload::kOutput, neighbour(1)});
    if (!stage_backward(shape_, out_.stage, m).keeps_graph()) act({ActionKind::kRelease, out_.stage, m});
  }

  void backward(int64_t m) {
    send_gradient();
    const PieceBackward plan = stage_backward(shape_, out_.stage, m);
    if (!plan.keeps_graph()) return;
    if (out_.stage + 1 < shape_.stages) act({ActionKind::kReceive, out_.stage, m, Payload::kGradient, neighbour(1)});
    act({ActionKind::kBackward, out_.stage, m});
    act({ActionKind::kRelease, out_.stage, m});
    if (plan.input_grad) gradient_of_ = m;
  }

  // The gradient that waits for the next micro batch to be taken (see make_1f1b).
  void send_gradient() {
    const int64_t m = std::exchange(gradient_of_, -1);
    if (m < 0) return;
    if (out_.stage > 0) {
      act({ActionKind::kSend, out_.stage, m, Payload::kGradient, neighbour(-1)});
    } else if (shape_.encoder == EncoderPlace::kOwnRanks) {
      for (const int64_t e : at(m).encoders) {
        act({ActionKind::kSend, 0, m, Payload::kGradient, schedule_.encoder_rank(e)});
      }
    }
  }

  void encode(int64_t m) {
    act({ActionKind::kForward, kEncoderStage, m});
    act({ActionKind::kSend, kEncoderStage, m, Payload::kOutput, schedule_.rank_of(at(m).replica, 0)});
    if (!shape_.encoder_trained) act({ActionKind::kRelease, kEncoderStage, m});
  }

  void encode_backward(int64_t m) {
    if (!shape_.encoder_trained) return;
    act({ActionKind::kReceive, kEncoderStage, m, Payload::kGradient, schedule_.rank_of(at(m).replica, 0)});
    act({ActionKind::kBackward, kEncoderStage, m});
    act({ActionKind::kRelease, kEncoderStage, m});
  }

  // All of the compute before the first exchange: ranks with unequal shares of a micro batch wait once, not each time.
  void encode_all(const std::vector<int64_t>& mine) {
    for (const int64_t m : mine) {
      if (!encodes(m)) continue;
      act({ActionKind::kForward, kEncoderStage, m});
      ++out_.max_live_encoded;
    }
    for (const int64_t m : mine) {
      if (at(m).encoders.empty()) continue;
      act({ActionKind::kExchange, kEncoderStage, m, Payload::kOutput});
      if (encodes(m) && !shape_.encoder_trained) act({ActionKind::kRelease, kEncoderStage, m});
    }
  }

  void encode_all_backward(const std::vector<int64_t>& mine) {
    for (const int64_t m : mine) {
      if (!at(m).encoders.empty()) act({ActionKind::kExchange, kEncoderStage, m, Payload::kGradient});
    }
    for (const int64_t m : mine) {
      if (!encodes(m)) continue;
      act({ActionKind::kBackward, kEncoderStage, m});
      act({ActionKind::kRelease, kEncoderStage, m});
    }
  }

  const PipelineSchedule& schedule_;
  const PipelineShape& shape_;
  RankSchedule& out_;
  std::vector<std::vector<int64_t>> of_replica_;  // micro batches
  int64_t gradient_of_ = -1;
};

}  // namespace

PieceBackward stage_backward(const PipelineShape& shape, int64_t stage, int64_t microbatch) {
  const bool images = !shape.microbatches[static_cast<size_t>(microbatch)].encoders.empty();
  const auto trained = [&](int64_t s) {
    if (s == kEncoderStage) return images && shape.encoder_trained;
    return shape.stage_trained.empty() || shape.stage_trained[static_cast<size_t>(s)];
  };
  std::vector<bool> pieces;
  for (int64_t s = kEncoderStage; s <= stage; ++s) pieces.push_back(trained(s));
  return plan_backward(pieces).back();
}

std::vector<int64_t> PipelineSchedule::members(int64_t rank, const Action& action) const {
  const int64_t replica = ranks[static_cast<size_t>(rank)].replica;
  std::vector<int64_t> out;
  for (int64_t s = 0; s < shape.stages; ++s) {
    if (action.kind == ActionKind::kExchange || s == 0 || s == shape.stages - 1) out.push_back(rank_of(replica, s));
  }
  return out;
}

absl::StatusOr<PipelineSchedule> make_1f1b(const PipelineShape& shape) {
  PARVL_RETURN_IF_ERROR(check_shape(shape));
  PipelineSchedule out;
  out.shape = shape;
  for (int64_t replica = 0; replica < shape.replicas; ++replica) {
    for (int64_t stage = 0; stage < shape.stages; ++stage) {
      out.ranks.push_back({replica, stage, shape.encoder == EncoderPlace::kAllRanks ? stage : -1, 0, 0, {}});
      Builder(out, out.ranks.back()).stage();
    }
  }
  for (int64_t e = 0; e < shape.encoder_ranks; ++e) {
    out.ranks.push_back({-1, kEncoderStage, e, 0, 0, {}});
    Builder(out, out.ranks.back()).encoder();
  }
  return out;
}

}  // namespace parvl
