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

absl::StatusOr<std::vector<Prompt>> prepare(const Dataset& data, const PromptBuilder& prompts, int64_t begin,
                                            int64_t end, const ScoreOptions& options) {
  std::vector<Prompt> out;
  for (int64_t i = begin; i < end; ++i) {
    const PrepareOptions prepare{.max_length = options.max_length};
    PARVL_ASSIGN_OR_RETURN(Prompt prompt, prepare_sample(data.sample(i), prompts, prepare, i, options.images));
    out.push_back(std::move(prompt));
  }
  return out;
}

void add_batch(const Model& model, const std::vector<Prompt>& batch, const RunRanks& ranks, at::Device device,
               Sums& sums) {
  const MicroBatch one = make_micro_batch(model, to_sequences(batch, 0, batch.size()), device, ranks);
  const at::Tensor hidden = run_stages(model, ranks, one);
  if (!ranks.part().head) return;
  at::Tensor logits = model.backbone().logits(hidden.index_select(0, one.packed.loss_rows));
  if (!ranks.counts_loss()) return;
  if (logits.element_size() < 4) logits = logits.to(at::kFloat);
  sums.loss += at::cross_entropy_loss(logits, one.packed.targets, {}, at::Reduction::Sum).item<double>();
  sums.targets += static_cast<double>(one.packed.num_targets);
  const at::Tensor hits = logits.argmax(1).eq(one.packed.targets).cpu();
  const bool* hit = hits.data_ptr<bool>();
  for (const Prompt& prompt : batch) {
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
    const int64_t begin = std::min(round + options.batch * share.replica, count);
    const int64_t end = std::min(begin + options.batch, count);
    const auto batch = prepare(data, prompts, begin, end, options);
    PARVL_RETURN_IF_ERROR(ranks.agree(batch.status()));
    if (begin < end) add_batch(model, *batch, ranks, device, sums);
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
