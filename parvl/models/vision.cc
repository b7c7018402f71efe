#include "parvl/models/vision.h"

#include <algorithm>

#include "parvl/base/check.h"
#include "parvl/models/decoder.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

class Merger : public Projector {
 public:
  Merger(ParamTable& params, const VisionSpec& spec, int64_t llm_hidden, bool layer_norm) : spec_(spec) {
    const int64_t joined = spec.hidden * spec.merge * spec.merge;
    norm_ = make_norm(params, Module::kProjector, "norm", spec.hidden, 1e-6, layer_norm);
    mlp_.ranks = &params.ranks(Module::kProjector);
    mlp_.activation = "gelu";
    mlp_.up = make_linear(params, Module::kProjector, "fc1", joined, joined, true, {Split::kColumn});
    mlp_.down = make_linear(params, Module::kProjector, "fc2", joined, llm_hidden, true, {Split::kRow});
  }

  std::vector<Piece> pieces(const VisionBatch& batch) const override {
    return {{"projector", {"projector."}, [this, raster = batch.raster, rows = batch.merged](const Bundle& in) {
               const int64_t unit = spec_.merge * spec_.merge;
               const at::Tensor normed = norm_(in.at("features"));
               at::Tensor visual = mlp_(normed.reshape({normed.size(0) / unit, spec_.hidden * unit}), rows);
               if (raster.defined()) visual = visual.index_select(0, raster);
               return Bundle{{"visual", visual}};
             }}};
  }

 private:
  VisionSpec spec_;
  Norm norm_;
  Mlp mlp_;
};

}  // namespace

std::vector<std::pair<int64_t, int64_t>> patch_positions(const std::vector<Grid>& grids, int64_t merge) {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const Grid& grid : grids) {
    for (int64_t frame = 0; frame < grid.t; ++frame) {
      for (int64_t row = 0; row < grid.h; row += merge) {
        for (int64_t column = 0; column < grid.w; column += merge) {
          for (int64_t i = 0; i < merge * merge; ++i) out.emplace_back(row + i / merge, column + i % merge);
        }
      }
    }
  }
  return out;
}

RotaryTable vision_rope(const VisionSpec& spec, const std::vector<std::pair<int64_t, int64_t>>& positions,
                        at::ScalarType model_type, at::Device device) {
  const at::ScalarType type = model_type == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t axis_dim = spec.head_dim() / 2;
  const at::Tensor exponent = at::arange(0, axis_dim, 2, type) / static_cast<double>(axis_dim);
  const at::Tensor inv_freq = at::pow(at::Scalar(spec.rope_theta), exponent).reciprocal();
  const int64_t patches = static_cast<int64_t>(positions.size());
  at::Tensor at2 = at::empty({patches, 2, 1}, at::kLong);
  int64_t* cursor = at2.data_ptr<int64_t>();
  for (const auto& [row, column] : positions) {
    *cursor++ = row;
    *cursor++ = column;
  }
  const at::Tensor angles = (at2.to(type) * inv_freq).view({patches, axis_dim});
  return {upload(angles.cos(), device), upload(angles.sin(), device)};
}

std::vector<int64_t> frame_lengths(const std::vector<Grid>& grids) {
  std::vector<int64_t> out;
  for (const Grid& grid : grids) out.insert(out.end(), static_cast<size_t>(grid.t), grid.h * grid.w);
  return out;
}

std::unique_ptr<Projector> make_merger(ParamTable& params, const VisionSpec& spec, int64_t llm_hidden,
                                       bool layer_norm) {
  return std::make_unique<Merger>(params, spec, llm_hidden, layer_norm);
}

RopePositions mrope_positions(int64_t tokens, const std::vector<ImageSpan>& images, int64_t merge) {
  RopePositions out;
  const auto text_until = [&](int64_t end) {
    for (; static_cast<int64_t>(out.at.size()) < end; ++out.next) out.at.push_back({out.next, out.next, out.next});
  };
  for (const ImageSpan& image : images) {
    text_until(image.begin);
    const int64_t rows = image.grid.h / merge, columns = image.grid.w / merge, start = out.next;
    for (int64_t t = 0; t < image.grid.t; ++t) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) out.at.push_back({start + t, start + row, start + column});
      }
    }
    out.next = start + std::max(rows, columns);
  }
  text_until(tokens);
  PARVL_CHECK(static_cast<int64_t>(out.at.size()) == tokens, "an image's tokens reach beyond the sequence");
  return out;
}

std::vector<std::string> vl_checkpoint_names(const Param& param, const NameParts& vision_parts) {
  static const NameParts kMergerParts = {
      {"norm.", "merger.ln_q."}, {"fc1.", "merger.mlp.0."}, {"fc2.", "merger.mlp.2."}};
  if (param.module == Module::kBackbone) {
    const std::string inside = decoder_checkpoint_name(param.name);
    if (inside.empty()) return {"lm_head.weight"};
    return {"model." + inside, "model.language_model." + inside};
  }
  std::string inside = param.name.substr(param.name.find('.') + 1);
  for (const auto& [ours, theirs] : param.module == Module::kProjector ? kMergerParts : vision_parts) {
    const size_t at = inside.find(ours);
    if (at == std::string::npos) continue;
    inside.replace(at, ours.size(), theirs);
    break;
  }
  return {"visual." + inside, "model.visual." + inside};
}

PatchEmbed make_patch_embed(ParamTable& params, const VisionSpec& spec) {
  Param* weight = params.add(Module::kVisionEncoder, "patch_embed.weight", {spec.hidden, spec.patch_values()});
  weight->checkpoint_shape = {spec.hidden, spec.in_channels, spec.temporal_patch, spec.patch, spec.patch};
  return {&params.ranks(Module::kVisionEncoder), spec.merge * spec.merge, weight};
}

Piece PatchEmbed::piece(const at::Tensor& order) const {
  return {"vision_encoder.patch_embed", {"vision_encoder.patch_embed."}, [this, order](const Bundle& in) {
            const at::Tensor pixels = in.at("pixels"),
                             ordered = order.defined() ? pixels.index_select(0, order) : pixels;
            const at::Tensor own = ranks->own_rows(ordered, ranks->split(ordered.size(0), row_unit));
            return Bundle{{"features", linear(own, *weight, nullptr)}};
          }};
}

VisionBlock make_vision_block(ParamTable& params, const VisionSpec& spec, int64_t index, bool layer_norm, bool gated) {
  const Module m = Module::kVisionEncoder;
  const std::string prefix = "blocks." + std::to_string(index) + ".";
  VisionBlock block;
  block.ranks = block.mlp.ranks = &params.ranks(m);
  block.row_unit = spec.merge * spec.merge;
  block.heads = spec.heads;
  block.attn_norm = make_norm(params, m, prefix + "attn_norm", spec.hidden, 1e-6, layer_norm);
  block.qkv = make_linear(params, m, prefix + "attn.qkv", spec.hidden, 3 * spec.hidden, true,
                          {Split::kColumn, spec.heads, /*blocks=*/3});
  block.out = make_linear(params, m, prefix + "attn.out", spec.hidden, spec.hidden, true, {Split::kRow, spec.heads});
  block.mlp_norm = make_norm(params, m, prefix + "mlp_norm", spec.hidden, 1e-6, layer_norm);
  block.mlp.activation = spec.activation;
  if (gated)
    block.mlp.gate =
        make_linear(params, m, prefix + "mlp.gate", spec.hidden, spec.intermediate, true, {Split::kColumn});
  block.mlp.up = make_linear(params, m, prefix + "mlp.up", spec.hidden, spec.intermediate, true, {Split::kColumn});
  block.mlp.down = make_linear(params, m, prefix + "mlp.down", spec.intermediate, spec.hidden, true, {Split::kRow});
  return block;
}

}  // namespace parvl
