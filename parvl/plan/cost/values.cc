#include "parvl/plan/cost/values.h"

#include <absl/strings/match.h>

#include <charconv>

#include "parvl/base/check.h"

namespace parvl {
namespace {

constexpr char kVision[] = "vision_encoder", kProjector[] = "projector", kBackbone[] = "llm_backbone";
constexpr char kEmbedding[] = "llm_backbone.embed.weight", kHead[] = "llm_backbone.head.weight";

// How a linear is cut: by its outputs, in whole units (0: single columns), or by its inputs.
struct Cut {
  bool by_inputs = false;
  int64_t units = 0;
  int64_t blocks = 1;
  bool copies = false;
};

// Parameters one after another, as the layers of nn/layers.cc make them.
class Lister {
 public:
  void tensor(const std::string& module, const std::string& name, std::vector<int64_t> shape) {
    ParamSpec param;
    param.module = module;
    param.name = absl::StrCat(module, ".", name);
    param.shape = std::move(shape);
    param.layer = layer_;
    out_.push_back(std::move(param));
  }
  void norm(const std::string& module, const std::string& name, int64_t size, bool bias) {
    tensor(module, name + ".weight", {size});
    if (bias) tensor(module, name + ".bias", {size});
  }
  void linear(const std::string& module, const std::string& name, std::pair<int64_t, int64_t> in_out, bool bias,
              const Cut& cut) {
    const auto [in, out] = in_out;
    const int64_t units = cut.units > 0 ? cut.units : (cut.by_inputs ? in : out) / cut.blocks;
    tensor(module, name + ".weight", {out, in});
    share(cut.by_inputs ? 1 : 0, units, cut);
    if (!bias) return;
    tensor(module, name + ".bias", {out});
    if (!cut.by_inputs) share(0, units, cut);  // else it is added once, after the sum over ranks
  }
  // By the vocabulary, anywhere.
  void words(const std::string& name, const BackboneSpec& b) {
    tensor(kBackbone, name, {b.vocab, b.hidden});
    out_.back().cut = 0;
  }
  void in_layer(int64_t layer) { layer_ = layer; }
  ParamSpec& last() { return out_.back(); }
  std::vector<ParamSpec> take() { return std::move(out_); }

 private:
  void share(int dim, int64_t units, const Cut& cut) {
    out_.back().cut = dim;
    out_.back().units = units;
    out_.back().blocks = cut.blocks;
    out_.back().copies = cut.copies;
  }
  std::vector<ParamSpec> out_;
  int64_t layer_ = -1;
};

void list_layer(Lister& list, const BackboneSpec& b, int64_t layer) {
  const int64_t h = b.hidden, q = b.heads * b.head_dim, kv = b.kv_heads * b.head_dim;
  const std::string prefix = absl::StrCat("layers.", layer, ".");
  const Cut key_heads{.units = b.kv_heads, .copies = true};
  list.in_layer(layer);
  list.norm(kBackbone, prefix + "attn_norm", h, false);
  list.linear(kBackbone, prefix + "attn.q", {h, q}, b.qkv_bias, {.units = b.heads});
  list.linear(kBackbone, prefix + "attn.k", {h, kv}, b.qkv_bias, key_heads);
  list.linear(kBackbone, prefix + "attn.v", {h, kv}, b.qkv_bias, key_heads);
  list.linear(kBackbone, prefix + "attn.out", {q, h}, b.out_bias, {.by_inputs = true, .units = b.heads});
  list.norm(kBackbone, prefix + "mlp_norm", h, false);
  list.linear(kBackbone, prefix + "mlp.gate", {h, b.intermediate}, b.mlp_bias, {});
  list.linear(kBackbone, prefix + "mlp.up", {h, b.intermediate}, b.mlp_bias, {});
  list.linear(kBackbone, prefix + "mlp.down", {b.intermediate, h}, b.mlp_bias, {.by_inputs = true});
  list.in_layer(-1);
}

// Windows, RMSNorm and a gated MLP are Qwen2.5-VL's.
bool is_gated(const ModelSpec& spec) { return spec.family == Family::kQwen25Vl; }

void list_vision(Lister& list, const ModelSpec& spec) {
  const VisionSpec& v = *spec.vision;
  const bool gated = is_gated(spec);
  list.tensor(kVision, "patch_embed.weight", {v.hidden, v.patch_values()});
  for (int64_t i = 0; i < v.layers; ++i) {
    const std::string prefix = absl::StrCat("blocks.", i, ".");
    list.norm(kVision, prefix + "attn_norm", v.hidden, !gated);
    list.linear(kVision, prefix + "attn.qkv", {v.hidden, 3 * v.hidden}, true, {.units = v.heads, .blocks = 3});
    list.linear(kVision, prefix + "attn.out", {v.hidden, v.hidden}, true, {.by_inputs = true, .units = v.heads});
    list.norm(kVision, prefix + "mlp_norm", v.hidden, !gated);
    if (gated) list.linear(kVision, prefix + "mlp.gate", {v.hidden, v.intermediate}, true, {});
    list.linear(kVision, prefix + "mlp.up", {v.hidden, v.intermediate}, true, {});
    list.linear(kVision, prefix + "mlp.down", {v.intermediate, v.hidden}, true, {.by_inputs = true});
  }
  const int64_t joined = v.hidden * v.merge * v.merge;
  list.norm(kProjector, "norm", v.hidden, !gated);
  list.linear(kProjector, "fc1", {joined, joined}, true, {});
  list.linear(kProjector, "fc2", {joined, spec.backbone.hidden}, true, {.by_inputs = true});
}

}  // namespace

int64_t ParamSpec::values() const {
  int64_t out = 1;
  for (const int64_t size : shape) out *= size;
  return out;
}

std::vector<ParamSpec> list_params(const ModelSpec& spec) {
  const BackboneSpec& b = spec.backbone;
  Lister list;
  if (spec.vision) list_vision(list, spec);
  list.words("embed.weight", b);
  if (b.tied) list.last().tied = kHead;
  for (int64_t i = 0; i < b.layers; ++i) list_layer(list, b, i);
  list.norm(kBackbone, "norm", b.hidden, false);
  if (!b.tied) list.words("head.weight", b);
  return list.take();
}

ValueCounts value_counts(const ModelSpec& spec, int64_t align) {
  ValueCounts out;
  out.layers = spec.backbone.layers;
  for (const ParamSpec& param : list_params(spec)) {
    const int64_t values = (param.values() + align - 1) / align * align;
    if (param.module == kVision) {
      out.vision_encoder += values;
    } else if (param.module == kProjector) {
      out.projector += values;
    } else if (param.layer >= 0) {
      if (param.layer == 0) out.layer += values;
    } else if (param.name == kEmbedding) {
      out.embedding = values;
    } else {
      (param.name == kHead ? out.head : out.norm) = values;
    }
  }
  return out;
}

int64_t stage_values(const ValueCounts& counts, const StagePart& part) {
  int64_t out = part.layers * counts.layer;
  if (part.embedding) out += counts.embedding;
  if (!part.head) return out;
  const bool copy = counts.head == 0 && !part.embedding;
  return out + counts.norm + (copy ? counts.embedding : counts.head);
}

absl::StatusOr<HeldPart> held_part(const ParamSpec& param, int64_t ranks, int64_t rank) {
  HeldPart out;
  out.values = param.values();
  if (ranks == 1 || param.cut < 0) return out;
  const int64_t length = param.shape[static_cast<size_t>(param.cut)], block = length / param.blocks;
  const int64_t units = param.units > 0 ? param.units : block;
  if (param.copies && ranks > units && ranks % units == 0) {
    out.parts = units;
    out.copies = ranks / units;
  } else if (param.units > 0 ? units % ranks == 0 : ranks <= units) {
    out.parts = ranks;
  } else {
    return invalid(param.module, ": tp = ", ranks, " does not divide the ", units, " parts that ", param.name,
                   " has (heads, or columns of an MLP)", param.copies ? ", nor is it a multiple of them" : "");
  }
  const int64_t index = rank / out.copies;
  const int64_t own = (index + 1) * block / out.parts - index * block / out.parts;
  out.values = out.values / length * own * param.blocks;
  return out;
}

bool on_stage(std::string_view name, bool tied_embedding, const StagePart& part) {
  constexpr std::string_view kLayers = "llm_backbone.layers.";
  if (name == kEmbedding) return part.embedding || (part.head && tied_embedding);
  if (name.substr(0, kLayers.size()) != kLayers) return part.head;
  name.remove_prefix(kLayers.size());
  int64_t layer = -1;
  PARVL_CHECK(std::from_chars(name.data(), name.data() + name.size(), layer).ec == std::errc(),
              "a layer has no number");
  return layer >= part.first_layer && layer < part.first_layer + part.layers;
}

bool on_stage(const ParamSpec& param, const StagePart& part) {
  if (param.module != kBackbone) return true;
  return on_stage(param.name, !param.tied.empty(), part);
}

}  // namespace parvl
