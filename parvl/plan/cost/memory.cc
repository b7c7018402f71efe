#include "parvl/plan/cost/memory.h"

#include <algorithm>

#include "parvl/base/check.h"
#include "parvl/plan/cost/values.h"

namespace parvl {
namespace {

constexpr int64_t kAlign = 64;  // values (ParamTable::allocate)

// Windows, RMSNorm and a gated MLP are Qwen2.5-VL's.
bool is_gated(const ModelSpec& spec) { return spec.family == Family::kQwen25Vl; }

int64_t wide_bytes(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

// Attention of `queries` rows over `keys` rows (with `heads` heads of `dim`), inputs and output left out: what the
// library keeps beside them. On the CPU each thread works on blocks of 256 queries and 512 keys.
int64_t attention_scratch(int64_t queries, int64_t keys, int64_t heads, int64_t dim, DType dtype,
                          const Target& target) {
  const int64_t wide = wide_bytes(dtype), sums = queries * heads * wide;
  if (target.cuda) {
    // In float64 there is no fused kernel: the scores and their softmax are whole.
    return sums + (dtype == DType::kFloat64 ? 3 * heads * queries * keys * wide : 0);
  }
  const int64_t block_q = queries >= 768 ? 256 : queries >= 192 ? 64 : 32;
  const int64_t q = std::min(block_q, queries), k = std::min<int64_t>(512, keys);
  const bool narrow = dtype == DType::kBFloat16 || dtype == DType::kFloat16;
  return sums + target.threads * (q * (k + 2 + dim) * wide + (narrow ? q * k * dtype_bytes(dtype) : 0));
}

// Attention inside one layer: the worst of a piece that begins its sequence and one that continues it.
int64_t attention_bytes(const BackboneSpec& b, DType dtype, const StepShape& s, const Target& target) {
  const int64_t q = b.heads * b.head_dim, kv = b.kv_heads * b.head_dim, bytes = dtype_bytes(dtype);
  const int64_t out = s.tokens * q * bytes, piece = s.longest_piece, keys = s.longest_context;
  const int64_t repeated = b.heads == b.kv_heads ? 0 : 2 * piece * q * bytes;
  const int64_t first =
      repeated + piece * q * bytes + attention_scratch(piece, piece, b.heads, b.head_dim, dtype, target);
  if (keys <= piece) return out + first;
  // Keys and values are gathered from the pages and repeated for each query head; the mask is there three times, once
  // in the type of the queries.
  const int64_t gathered = 2 * keys * q * bytes, gathering = 2 * (keys + 16) * kv * bytes;
  const int64_t seen = piece > 1 ? piece * keys + 8 * (piece + keys) : 0,
                mask = piece > 1 ? piece * keys * (1 + bytes) : 0;
  const int64_t rest = gathered + seen +
                       std::max(gathering, mask + piece * q * bytes +
                                               attention_scratch(piece, keys, b.heads, b.head_dim, dtype, target));
  return out + std::max(first, rest);
}

// What a 16-bit product on the CPU keeps beside its tensors: the inputs of few rows in float32, or what the library
// copies of the rows that each thread works on.
int64_t product_scratch(int64_t rows, int64_t width, DType dtype, const Target& target) {
  if (target.cuda || (dtype != DType::kBFloat16 && dtype != DType::kFloat16)) return 0;
  if (rows <= 8) return rows * width * 4;
  const int64_t at_once = std::max<int64_t>(64, (128 << 10) / (width * 2));
  return target.threads * ((32 << 10) + std::min(rows, at_once) * width * 2);
}

}  // namespace

WeightBytes weight_bytes(const ModelSpec& spec, DType dtype) {
  const ValueCounts counts = value_counts(spec, kAlign);
  const int64_t bytes = dtype_bytes(dtype);
  return {counts.vision_encoder * bytes, counts.projector * bytes, counts.backbone() * bytes};
}

int64_t backbone_bytes(const ModelSpec& spec, DType dtype, const BackboneRank& rank) {
  int64_t values = 0;
  for (const ParamSpec& param : list_params(spec)) {
    if (param.module != "llm_backbone" || (rank.stage && !on_stage(param, *rank.stage))) continue;
    const auto held = held_part(param, rank.ranks, rank.rank);
    PARVL_CHECK(held.ok(), "the memory of a cut that cannot be made");
    values += (held->values + kAlign - 1) / kAlign * kAlign;
  }
  return values * dtype_bytes(dtype);
}

BackboneSpec rank_backbone(BackboneSpec spec, const BackboneRank& rank) {
  if (rank.stage) spec.layers = rank.stage->layers;
  spec.heads /= rank.ranks;
  spec.kv_heads = std::max<int64_t>(1, spec.kv_heads / rank.ranks);  // with more than heads, several have the same
  spec.intermediate /= rank.ranks;
  return spec;
}

int64_t kv_bytes_a_token(const BackboneSpec& spec, DType dtype) {
  return 2 * spec.layers * spec.kv_heads * spec.head_dim * dtype_bytes(dtype);
}

int64_t visual_bytes(const ModelSpec& spec, DType dtype, int64_t patches) {
  if (!spec.vision) return 0;
  const int64_t merge = spec.vision->merge;
  return patches / (merge * merge) * spec.backbone.hidden * dtype_bytes(dtype);
}

int64_t step_bytes(const BackboneSpec& whole, DType dtype, const StepShape& s, const Target& target) {
  const BackboneSpec b = rank_backbone(whole, {s.ranks});
  const int64_t bytes = dtype_bytes(dtype), wide = wide_bytes(dtype);
  const int64_t h = s.tokens * b.hidden * bytes, i = s.tokens * b.intermediate * bytes;
  const int64_t q = s.tokens * b.heads * b.head_dim * bytes, kv = s.tokens * b.kv_heads * b.head_dim * bytes;
  // All the time: token ids, angles, image embeddings with their rows, and where keys and values go.
  const int64_t always =
      s.tokens * (8 + b.head_dim * wide + (target.cuda ? 24 : 0)) + s.visual_tokens * (b.hidden * bytes + 8);
  // Where it is cut a rank has its own rows between matrices. All of them are gathered before a matrix; after one each
  // rank's part of all sums is there, and once more filled up to equal parts.
  // With one token of each sequence a rank has all rows.
  const bool all_rows = s.ranks == 1 || s.longest_piece <= 1;
  const int64_t own = all_rows ? h : (s.tokens + s.ranks - 1) / s.ranks * b.hidden * bytes;
  const int64_t gathered = all_rows ? 0 : h, summed = s.ranks == 1 ? 0 : all_rows ? h : 2 * h;
  // In a layer: its input; queries, keys and values before and after their rotation (the values need none).
  const int64_t rotated = own + 2 * q + 3 * kv;
  const int64_t projecting = rotated + 2 * own + gathered;
  const int64_t attending = rotated + attention_bytes(b, dtype, s, target);
  const int64_t mixing =
      rotated + q + 2 * own + summed + product_scratch(s.tokens, b.heads * b.head_dim, dtype, target);
  const int64_t feeding = rotated + q + 3 * own + gathered + summed + 3 * i +
                          product_scratch(s.tokens, b.intermediate, dtype, target) + s.tokens * wide;
  // The output matrix: the rows, normed; logits in the model's type, where it is cut those of all ranks, without what
  // fills them up, and in the order of rows.
  const int64_t copies = s.ranks == 1 ? 1 : b.vocab % s.ranks == 0 ? 2 : 3;
  const int64_t transposing = s.ranks == 1 ? 0 : 60 * 60 * bytes;  // the library's block for it
  const int64_t logits = s.sampled * (3 * b.hidden * bytes + copies * b.vocab * bytes) + transposing;
  // When nothing but the logits is left: those for the CPU's sampler, float32.
  const int64_t choosing = s.sampled * b.vocab * (bytes + (bytes == 4 ? 0 : 4));
  return std::max(always + std::max({projecting, attending, mixing, feeding, own + gathered + logits}), choosing);
}

// A row that the request's fields have edited, and 16 bytes for each token that may be drawn.
int64_t sampling_bytes(const BackboneSpec& spec, int64_t sampled) { return sampled * spec.vocab * (4 + 16); }

int64_t encode_bytes(const ModelSpec& spec, DType dtype, int64_t patches, const Target& target) {
  if (!spec.vision) return 0;
  const VisionSpec& v = *spec.vision;
  const bool gated = is_gated(spec);
  const int64_t bytes = dtype_bytes(dtype), wide = wide_bytes(dtype);
  const int64_t pixels = patches * v.patch_values(), h = patches * v.hidden * bytes;
  const int64_t i = patches * v.intermediate * bytes;
  const int64_t always = bytes * pixels + patches * (v.head_dim() * wide + (gated ? 8 : 0));
  const int64_t embedding =
      (gated ? bytes * pixels : 0) + h + product_scratch(patches, v.patch_values(), dtype, target);
  // In a block: its input; queries, keys and values; the first two rotated.
  const int64_t rotated = 6 * h;
  // The outputs of windows one by one, then joined.
  const int64_t attending =
      rotated + (gated ? 2 : 1) * h + attention_scratch(patches, patches, v.heads, v.head_dim(), dtype, target);
  const bool three = gated || v.activation == "quick_gelu";
  const int64_t feeding = rotated + 3 * h + std::max((three ? 3 : 2) * i, (gated ? 3 : 2) * i + h) +
                          2 * patches * wide + product_scratch(patches, v.intermediate, dtype, target);
  const int64_t projecting = 4 * h + 2 * visual_bytes(spec, dtype, patches);
  return always + std::max({embedding, attending, feeding, projecting});
}

}  // namespace parvl
