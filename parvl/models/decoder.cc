#include "parvl/models/decoder.h"

#include <cmath>

#include "parvl/base/check.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

// Llama 3.1's scaling: wavelengths beyond the original context are slowed by `factor`, those well inside it kept, and
// the band between them interpolated (the formula of the published configuration's rope_type "llama3").
at::Tensor llama3_scaled(const at::Tensor& inv_freq, const RopeScaling& s) {
  const at::Tensor wavelength = 2 * M_PI / inv_freq;
  const double low = s.original_max_positions / s.low_freq_factor, high = s.original_max_positions / s.high_freq_factor;
  const at::Tensor slow = at::where(wavelength > low, inv_freq / s.factor, inv_freq);
  const at::Tensor smooth =
      (s.original_max_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  const at::Tensor smoothed = (1 - smooth) * slow / s.factor + smooth * slow;
  const at::Tensor between = at::logical_and(wavelength >= high, wavelength <= low);
  return at::where(between, smoothed, slow);
}

class Decoder : public Backbone {
 public:
  Decoder(ParamTable& params, const BackboneSpec& spec)
      : spec_(spec), params_(params), ranks_(params.ranks(Module::kBackbone)) {
    const Shard by_token{.dim = 0};
    embed_ = params.add(Module::kBackbone, "embed.weight", {spec.vocab, spec.hidden}, Init::kNormal, by_token);
    for (int64_t i = 0; i < spec.layers; ++i) layers_.push_back(make_decoder_layer(params, spec, i));
    norm_ = make_norm(params, Module::kBackbone, "norm", spec.hidden, spec.norm_eps, false);
    Param* head = params.add(Module::kBackbone, "head.weight", {spec.vocab, spec.hidden}, Init::kNormal, by_token);
    if (spec.tied) head->tied_to = params.find(embed_->name);
    head_.weight = head;
    inv_freq_float_ = inverse_frequencies(spec, at::kFloat);
    inv_freq_double_ = inverse_frequencies(spec, at::kDouble);
    // Which axis each frequency turns with: the sections one after another, time first.
    std::vector<int64_t> axes;
    for (size_t axis = 0; axis < spec.mrope_section.size(); ++axis) {
      axes.insert(axes.end(), static_cast<size_t>(spec.mrope_section[axis]), static_cast<int64_t>(axis));
    }
    axes.resize(static_cast<size_t>(spec.head_dim / 2), 0);
    axes_ = at::tensor(axes, at::kLong);
  }

  std::vector<Piece> pieces(const BackboneBatch& batch) const override {
    std::vector<Piece> out;
    out.push_back({"llm_backbone.embed", {embed_->name}, [this, batch](const Bundle& in) {
                     const RowSplit rows = ranks_.split(batch.ids.size(0));
                     const at::Tensor hidden = embedding(batch.ids, *embed_, ranks_, rows);
                     if (!batch.visual_rows.defined()) return Bundle{{"hidden", hidden}};
                     return Bundle{{"hidden", put_visual(hidden, in.at("visual"), batch.visual_rows, rows)}};
                   }});
    for (const DecoderLayer& layer : layers_) {
      const std::string name = "llm_backbone.layers." + std::to_string(layer.index);
      out.push_back({name, {name + "."}, [&layer, batch](const Bundle& in) {
                       return Bundle{{"hidden", layer(in.at("hidden"), batch.rope, *batch.attention)}};
                     }});
    }
    return out;
  }

  Piece loss_piece(int64_t tokens, at::Tensor rows, at::Tensor targets, double scale) const override {
    std::vector<std::string> owns = {"llm_backbone.norm.", "llm_backbone.head."};
    if (head_.weight->tied_to != nullptr) owns.push_back(embed_->name);
    return {"llm_backbone.loss", owns, [this, tokens, rows, targets, scale](const Bundle& in) {
              const at::Tensor hidden = ranks_.gather_rows(in.at("hidden"), ranks_.split(tokens));
              const at::Tensor picked = norm_(hidden.index_select(0, rows));
              return Bundle{{"loss", head_loss(picked, *head_.weight, targets, scale, ranks_)}};
            }};
  }

  at::Tensor logits(const at::Tensor& hidden_RH) const override {
    at::NoGradGuard no_grad;
    const at::Tensor own = head_(norm_(hidden_RH));
    if (ranks_.alone()) return own;
    RowSplit columns;
    const Param& head = *head_.weight;
    for (int64_t i = 0; i < ranks_.size(); ++i) {
      columns.counts.push_back(head.part_range(i).second - head.part_range(i).first);
    }
    return ranks_.gather_rows(own.t(), columns).t();
  }

  RotaryTable rope(const std::vector<std::array<int64_t, 3>>& positions, at::Device device) const override {
    const bool wide = params_.owned().front()->value.scalar_type() == at::kDouble;  // the embedding may be elsewhere
    const int64_t tokens = static_cast<int64_t>(positions.size());
    at::Tensor at3 = at::empty({tokens, 3}, at::kLong);
    std::copy_n(positions.data()->data(), tokens * 3, at3.data_ptr<int64_t>());
    const at::Tensor angles =
        at3.index_select(1, axes_).to(wide ? at::kDouble : at::kFloat) * (wide ? inv_freq_double_ : inv_freq_float_);
    return {upload(angles.cos(), device), upload(angles.sin(), device)};
  }

 private:
  // The embeddings of images in the rows of this rank that they take.
  at::Tensor put_visual(const at::Tensor& hidden, const at::Tensor& visual, const at::Tensor& visual_rows,
                        const RowSplit& rows) const {
    const at::Tensor values = visual.to(hidden.scalar_type());
    if (rows.counts.empty()) return hidden.index_copy(0, visual_rows, values);
    // The others' go to a row more, which is dropped: how many are here no host has to wait for.
    const int64_t own = hidden.size(0);
    const at::Tensor at = visual_rows - rows.begin(ranks_.rank());
    const at::Tensor to = at.masked_fill(at::logical_or(at.lt(0), at.ge(own)), own);
    const at::Tensor room = at::cat({hidden, at::zeros({1, hidden.size(1)}, hidden.options())});
    return room.index_copy(0, to, values).narrow(0, 0, own);
  }

  BackboneSpec spec_;
  const ParamTable& params_;
  const TensorParallel& ranks_;
  const Param* embed_;
  std::vector<DecoderLayer> layers_;
  Norm norm_;
  Linear head_;
  at::Tensor inv_freq_float_, inv_freq_double_, axes_;
};

}  // namespace

at::Tensor inverse_frequencies(const BackboneSpec& spec, at::ScalarType type) {
  const at::Tensor exponent = at::arange(0, spec.head_dim, 2, type) / static_cast<double>(spec.head_dim);
  at::Tensor inv_freq = at::pow(at::Scalar(spec.rope_theta), exponent).reciprocal();
  if (spec.rope_scaling.type == "linear") inv_freq = inv_freq / spec.rope_scaling.factor;
  if (spec.rope_scaling.type == "llama3") inv_freq = llama3_scaled(inv_freq, spec.rope_scaling);
  return inv_freq;
}

std::unique_ptr<Backbone> make_decoder(ParamTable& params, const BackboneSpec& spec) {
  return std::make_unique<Decoder>(params, spec);
}

std::string decoder_checkpoint_name(const std::string& parvl_name) {
  static const std::pair<const char*, const char*> kParts[] = {
      {".attn_norm.", ".input_layernorm."}, {".mlp_norm.", ".post_attention_layernorm."},
      {".attn.q.", ".self_attn.q_proj."},   {".attn.k.", ".self_attn.k_proj."},
      {".attn.v.", ".self_attn.v_proj."},   {".attn.out.", ".self_attn.o_proj."},
      {".mlp.gate.", ".mlp.gate_proj."},    {".mlp.up.", ".mlp.up_proj."},
      {".mlp.down.", ".mlp.down_proj."}};
  std::string name = parvl_name.substr(std::string("llm_backbone.").size());
  if (name == "head.weight") return "";
  if (name == "embed.weight") return "embed_tokens.weight";
  for (const auto& [ours, theirs] : kParts) {
    const size_t at = name.find(ours);
    if (at != std::string::npos) return name.replace(at, std::string(ours).size(), theirs);
  }
  return name;
}

}  // namespace parvl
