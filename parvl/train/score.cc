#include "parvl/train/score.h"

#include <algorithm>
#include <array>

#include "parvl/train/pipeline_run.h"
#include "parvl/train/trainer.h"

namespace parvl {

namespace {

// Sums over samples.
struct Sums {
  double loss = 0, targets = 0, samples = 0, right = 0;
};

// Samples that go through the model at once.
struct ScoreBatch {
  int64_t replica = 0;  // whose they are
  std::vector<Prompt> samples;
  std::vector<int64_t> encoders;  // as make_micro_batch
};

absl::Status prepare(const Dataset& data, const PromptBuilder& prompts, std::pair<int64_t, int64_t> range,
                     const ScoreOptions& options, const EncoderShare& encoders, ScoreBatch& out) {
  const auto [begin, end] = range;
  std::vector<SampleCost> costs(static_cast<size_t>(end - begin));
  for (int64_t i = begin; i < end && encoders.groups > 0; ++i) {
    PARVL_ASSIGN_OR_RETURN(costs[static_cast<size_t>(i - begin)], estimate_cost(data.sample(i), prompts));
  }
  std::vector<double> load(static_cast<size_t>(encoders.groups), 0);
  const auto groups = deal_images(costs, load);
  for (int64_t i = begin; i < end; ++i) {
    const std::vector<int64_t>& of_sample = groups[static_cast<size_t>(i - begin)];
    const PrepareOptions how{.max_length = options.max_length, .decode = encoders.decode(of_sample)};
    PARVL_ASSIGN_OR_RETURN(Prompt prompt, prepare_sample(data.sample(i), prompts, how, i, options.images));
    if (encoders.groups > 0) {
      for (const int64_t encoder : encoders_of(prompt, of_sample)) out.encoders.push_back(encoder);
    }
    out.samples.push_back(std::move(prompt));
  }
  return absl::OkStatus();
}

void add_batch(const Model& model, const ScoreBatch& batch, const RunRanks& ranks, at::Device device, Sums& sums) {
  const MicroBatch one =
      make_micro_batch(model, to_sequences(batch.samples, 0, batch.samples.size()), device, ranks, batch.encoders);
  const at::Tensor hidden = run_stages(model, ranks, one, batch.replica);
  if (!ranks.part().head) return;
  at::Tensor logits = model.backbone().logits(hidden.index_select(0, one.packed.loss_rows));
  if (!ranks.counts_loss()) return;
  if (logits.element_size() < 4) logits = logits.to(at::kFloat);
  sums.loss += at::cross_entropy_loss(logits, one.packed.targets, {}, at::Reduction::Sum).item<double>();
  sums.targets += static_cast<double>(one.packed.num_targets);
  const at::Tensor hits = logits.argmax(1).eq(one.packed.targets).cpu();
  const bool* hit = hits.data_ptr<bool>();
  for (const Prompt& prompt : batch.samples) {
    bool any = false, all = true;
    for (size_t i = 1; i < prompt.is_target.size(); ++i) {
      if (!prompt.is_target[i]) continue;
      any = true;
      all = *hit++ && all;
    }
    sums.samples += any;
    sums.right += any && all;
  }
}

}  // namespace

absl::StatusOr<Score> score_dataset(const Model& model, const PromptBuilder& prompts, const Dataset& data,
                                    at::Device device, const ScoreOptions& options) {
  at::NoGradGuard no_grad;
  const RunRanks alone(model.spec()), &ranks = options.ranks == nullptr ? alone : *options.ranks;
  const BatchShare share = ranks.share(options.batch);
  const int64_t count = options.limit > 0 ? std::min(options.limit, data.size()) : data.size();
  Sums sums;
  for (int64_t round = 0; round < count; round += options.batch * share.replicas) {
    std::vector<ScoreBatch> batches;  // this replica's, or on an encoder's own rank each one's
    absl::Status status;
    for (int64_t replica = 0; replica < share.replicas; ++replica) {
      const int64_t begin = std::min(round + options.batch * replica, count);
      const int64_t end = std::min(begin + options.batch, count);
      if (begin == end || (share.replica >= 0 && share.replica != replica)) continue;
      batches.emplace_back().replica = replica;
      status.Update(prepare(data, prompts, {begin, end}, options, ranks.encoder_share(), batches.back()));
    }
    PARVL_RETURN_IF_ERROR(ranks.agree(status));
    for (const ScoreBatch& batch : batches) add_batch(model, batch, ranks, device, sums);
    if (options.stop_requested && options.stop_requested()) return absl::CancelledError("scoring was stopped");
  }
  std::array<double, 4> all = {sums.loss, sums.targets, sums.samples, sums.right};
  PARVL_RETURN_IF_ERROR(ranks.sum(absl::MakeSpan(all)));
  Score score;
  score.loss = all[1] > 0 ? all[0] / all[1] : 0;
  score.samples = static_cast<int64_t>(all[2]);
  score.accuracy = all[3] / std::max(1.0, all[2]);
  return score;
}

}  // namespace parvl
