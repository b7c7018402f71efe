#include "parvl/plan/cost/flops.h"

#include <algorithm>
#include <numeric>

namespace parvl {
namespace {

double encoder_flops(const VisionSpec& v, int64_t llm_hidden, const std::vector<int64_t>& image_patches) {
  const bool gated = v.window > 0;
  const double h = static_cast<double>(v.hidden), f = static_cast<double>(v.intermediate);
  const double block_weights = 4 * h * h + (gated ? 3 : 2) * h * f;
  const double joined = h * static_cast<double>(v.merge * v.merge);
  const double window_patches =
      v.window > 0 ? static_cast<double>(v.window / v.patch) * static_cast<double>(v.window / v.patch) : 0;
  double total = 0;
  for (int64_t count : image_patches) {
    const double p = static_cast<double>(count);
    total += 2 * p * h * static_cast<double>(v.patch_values());
    for (int64_t layer = 0; layer < v.layers; ++layer) {
      const auto& full = v.full_attention_layers;
      const bool whole = v.window == 0 || std::find(full.begin(), full.end(), layer) != full.end();
      const double keys = whole ? p : std::min(p, window_patches);
      total += 2 * p * block_weights + 4 * p * keys * h;
    }
    total += 2 * p / static_cast<double>(v.merge * v.merge) * joined * (joined + static_cast<double>(llm_hidden));
  }
  return total;
}

}  // namespace

double vision_forward_flops(const ModelSpec& spec, const std::vector<int64_t>& image_patches) {
  return spec.vision ? encoder_flops(*spec.vision, spec.backbone.hidden, image_patches) : 0;
}

double stage_forward_flops(const BackboneSpec& b, const StagePart& part, const BatchShape& shape) {
  const double h = static_cast<double>(b.hidden), q = static_cast<double>(b.heads * b.head_dim);
  const double kv = static_cast<double>(b.kv_heads * b.head_dim), f = static_cast<double>(b.intermediate);
  const double layer_weights = h * (2 * q + 2 * kv) + 3 * h * f;
  double total = part.head ? 2 * static_cast<double>(shape.loss_tokens) * h * static_cast<double>(b.vocab) : 0;
  for (int64_t count : shape.sequence_tokens) {
    const double t = static_cast<double>(count);
    total += static_cast<double>(part.layers) * (2 * t * layer_weights + 2 * t * t * q);
  }
  return total;
}

double forward_flops(const ModelSpec& spec, const BatchShape& shape) {
  const StagePart whole{0, spec.backbone.layers, true, true};
  return stage_forward_flops(spec.backbone, whole, shape) + vision_forward_flops(spec, shape.image_patches);
}

}  // namespace parvl
