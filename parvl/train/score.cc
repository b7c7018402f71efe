#include "parvl/train/score.h"

#include <algorithm>

#include "parvl/train/trainer.h"

namespace parvl {

absl::StatusOr<Score> score_dataset(const Model& model, const PromptBuilder& prompts, const Dataset& data,
                                    at::Device device, const ScoreOptions& options) {
  at::NoGradGuard no_grad;
  Score score;
  const int64_t count = options.limit > 0 ? std::min(options.limit, data.size()) : data.size();
  double loss = 0;
  int64_t targets = 0, right = 0;
  for (int64_t begin = 0; begin < count; begin += options.batch) {
    const int64_t end = std::min(begin + options.batch, count);
    std::vector<Prompt> batch;
    for (int64_t i = begin; i < end; ++i) {
      PARVL_ASSIGN_OR_RETURN(Prompt prompt, prepare_sample(data.sample(i), prompts, {.max_length = options.max_length},
                                                           i, options.images));
      batch.push_back(std::move(prompt));
    }
    const PackedBatch packed = pack(model, to_sequences(batch, 0, batch.size()), device);
    const at::Tensor hidden = run_backbone(model, packed, encode_images(model, packed, device));
    at::Tensor logits = model.backbone().logits(hidden.index_select(0, packed.loss_rows));
    if (logits.element_size() < 4) logits = logits.to(at::kFloat);
    loss += at::cross_entropy_loss(logits, packed.targets, {}, at::Reduction::Sum).item<double>();
    targets += packed.num_targets;
    const at::Tensor hits = logits.argmax(1).eq(packed.targets).cpu();
    const bool* hit = hits.data_ptr<bool>();
    for (const Prompt& prompt : batch) {
      bool any = false, all = true;
      for (size_t i = 1; i < prompt.is_target.size(); ++i) {
        if (!prompt.is_target[i]) continue;
        any = true;
        all = *hit++ && all;
      }
      score.samples += any;
      right += any && all;
    }
    if (options.on_batch) options.on_batch();
    if (options.stop_requested && options.stop_requested()) return absl::CancelledError("scoring was stopped");
  }
  score.loss = targets > 0 ? loss / static_cast<double>(targets) : 0;
  score.accuracy = static_cast<double>(right) / static_cast<double>(std::max<int64_t>(1, score.samples));
  return score;
}

}  // namespace parvl
