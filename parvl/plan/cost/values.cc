#include "parvl/plan/cost/values.h"

namespace parvl {
namespace {

// Tensors one after another.
struct Sum {
  int64_t align = 1;
  int64_t values = 0;
  void tensor(int64_t count) { values += (count + align - 1) / align * align; }
  void linear(int64_t in, int64_t out, bool bias) {
    tensor(in * out);
    if (bias) tensor(out);
  }
  void norm(int64_t size, bool bias) {
    tensor(size);
    if (bias) tensor(size);
  }
};

int64_t layer_values(const BackboneSpec& b, int64_t align) {
  const int64_t q = b.heads * b.head_dim, kv = b.kv_heads * b.head_dim;
  Sum layer{align};
  layer.norm(b.hidden, false);
  layer.linear(b.hidden, q, b.qkv_bias);
  layer.linear(b.hidden, kv, b.qkv_bias);
  layer.linear(b.hidden, kv, b.qkv_bias);
  layer.linear(q, b.hidden, b.out_bias);
  layer.norm(b.hidden, false);
  layer.linear(b.hidden, b.intermediate, b.mlp_bias);
  layer.linear(b.hidden, b.intermediate, b.mlp_bias);
  layer.linear(b.intermediate, b.hidden, b.mlp_bias);
  return layer.values;
}

// Windows, RMSNorm and a gated MLP are Qwen2.5-VL's.
bool is_gated(const ModelSpec& spec) { return spec.family == Family::kQwen25Vl; }

int64_t vision_values(const ModelSpec& spec, int64_t align) {
  const VisionSpec& v = *spec.vision;
  const bool gated = is_gated(spec);
  Sum block{align};
  block.norm(v.hidden, !gated);
  block.linear(v.hidden, 3 * v.hidden, true);
  block.linear(v.hidden, v.hidden, true);
  block.norm(v.hidden, !gated);
  for (int i = 0; i < (gated ? 2 : 1); ++i) block.linear(v.hidden, v.intermediate, true);
  block.linear(v.intermediate, v.hidden, true);
  Sum embed{align};
  embed.tensor(v.hidden * v.patch_values());
  return v.layers * block.values + embed.values;
}

int64_t projector_values(const ModelSpec& spec, int64_t align) {
  const VisionSpec& v = *spec.vision;
  const int64_t joined = v.hidden * v.merge * v.merge;
  Sum sum{align};
  sum.norm(v.hidden, !is_gated(spec));
  sum.linear(joined, joined, true);
  sum.linear(joined, spec.backbone.hidden, true);
  return sum.values;
}

}  // namespace

ValueCounts value_counts(const ModelSpec& spec, int64_t align) {
  const BackboneSpec& b = spec.backbone;
  Sum norm{align}, matrix{align};
  norm.norm(b.hidden, false);
  matrix.tensor(b.vocab * b.hidden);
  ValueCounts out;
  out.layers = b.layers;
  out.layer = layer_values(b, align);
  out.embedding = matrix.values;
  out.norm = norm.values;
  out.head = b.tied ? 0 : matrix.values;
  if (!spec.vision) return out;
  out.vision_encoder = vision_values(spec, align);
  out.projector = projector_values(spec, align);
  return out;
}

int64_t stage_values(const ValueCounts& counts, const StagePart& part) {
  int64_t out = part.layers * counts.layer;
  if (part.embedding) out += counts.embedding;
  if (!part.head) return out;
  const bool copy = counts.head == 0 && !part.embedding;
  return out + counts.norm + (copy ? counts.embedding : counts.head);
}

}  // namespace parvl
