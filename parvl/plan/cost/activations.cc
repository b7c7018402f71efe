#include "parvl/plan/cost/activations.h"

#include <algorithm>

namespace parvl {
namespace {

// Of sums and angles.
int64_t wide_bytes(DType value) { return value == DType::kFloat64 ? 8 : 4; }

int64_t part(int64_t all, int64_t ranks) { return (all + ranks - 1) / ranks; }

}  // namespace

int64_t layer_activations(const BackboneSpec& spec, int64_t tokens, const TensorCut& cut) {
  const int64_t h = spec.hidden, own = part(tokens, cut.ranks), bytes = dtype_bytes(cut.value);
  if (cut.recompute) return own * h * bytes;
  const int64_t heads = part(spec.heads, cut.ranks), key_heads = part(spec.kv_heads, cut.ranks);
  const int64_t q = heads * spec.head_dim, i = part(spec.intermediate, cut.ranks);
  const int64_t keys = heads == key_heads ? key_heads * spec.head_dim : q;  // repeated for the queries
  const int64_t values = 2 * own * h + tokens * (2 * h + 3 * q + 2 * keys + 3 * i);
  return values * bytes + (2 * own + tokens * heads) * wide_bytes(cut.value);
}

int64_t stage_activations(const BackboneSpec& spec, const StagePart& stage, const std::vector<PieceBackward>& pieces,
                          const MicrobatchRows& rows, const TensorCut& cut) {
  const int64_t bytes = dtype_bytes(cut.value), own = part(rows.tokens, cut.ranks);
  int64_t out = rows.tokens * (8 + spec.head_dim * wide_bytes(cut.value));
  const size_t first = stage.embedding ? 1 : 0;
  if (stage.embedding && pieces[0].keeps_graph()) out += rows.visual_tokens * spec.hidden * bytes;
  for (int64_t i = 0; i < stage.layers; ++i) {
    if (pieces[first + static_cast<size_t>(i)].keeps_graph()) out += layer_activations(spec, rows.tokens, cut);
  }
  return out + own * spec.hidden * bytes;
}

int64_t loss_activations(const BackboneSpec& spec, const MicrobatchRows& rows, const TensorCut& cut) {
  return rows.targets * (2 * spec.hidden + part(spec.vocab, cut.ranks)) * dtype_bytes(cut.value);
}

int64_t vision_activations(const ModelSpec& spec, const VisionRows& rows, const TensorCut& encoder,
                           const TensorCut& projector) {
  const VisionSpec& v = *spec.vision;
  const int64_t bytes = dtype_bytes(encoder.value), unit = v.merge * v.merge, h = v.hidden;
  const int64_t own = part(rows.patches / unit, encoder.ranks) * unit;
  const int64_t patches = rows.patches, merged = rows.merged, joined = h * unit;
  int64_t block = own * h, projected = part(merged, projector.ranks) * unit * h;
  if (!encoder.recompute) {
    const bool gated = spec.family == Family::kQwen25Vl;
    // Queries, keys and values before their rotation, of which the values are used; the two rotated; attention's output
    // twice.
    block += own * h +
             patches * (2 * h + 7 * part(h, encoder.ranks) + (gated ? 3 : 2) * part(v.intermediate, encoder.ranks));
    projected += merged * (joined + 2 * part(joined, projector.ranks));
  }
  const int64_t angles = patches * v.head_dim() * wide_bytes(encoder.value);
  return (patches * v.patch_values() + v.layers * block + projected + rows.given * spec.backbone.hidden) * bytes +
         angles;
}

}  // namespace parvl
