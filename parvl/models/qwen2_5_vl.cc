// Qwen2.5-VL: a ViT with window attention in most layers (RMSNorm, gated SiLU), a merging projector, a Qwen2 decoder
// with M-RoPE.
#include <algorithm>

#include "parvl/models/decoder.h"
#include "parvl/models/vision.h"
#include "parvl/nn/device.h"

namespace parvl {
namespace {

struct Windows {
  std::vector<int64_t> merged_order;  // merged tokens in window order
  std::vector<int64_t> lengths;       // patches a window
};

// Windows of window_size pixels over the merged grid; those at the right and lower border are smaller.
Windows make_windows(const VisionSpec& spec, const std::vector<Grid>& grids) {
  const int64_t side = spec.window / spec.merge / spec.patch;
  Windows out;
  int64_t base = 0;
  for (const Grid& grid : grids) {
    const int64_t rows = grid.h / spec.merge, columns = grid.w / spec.merge;
    for (int64_t t = 0; t < grid.t; ++t, base += rows * columns) {
      for (int64_t top = 0; top < rows; top += side) {
        for (int64_t left = 0; left < columns; left += side) {
          const int64_t bottom = std::min(top + side, rows), right = std::min(left + side, columns);
          for (int64_t row = top; row < bottom; ++row) {
            for (int64_t column = left; column < right; ++column)
              out.merged_order.push_back(base + row * columns + column);
          }
          out.lengths.push_back((bottom - top) * (right - left) * spec.merge * spec.merge);
        }
      }
    }
  }
  return out;
}

// Where each merged token is in window order.
std::vector<int64_t> raster_of(const Windows& windows) {
  std::vector<int64_t> out(windows.merged_order.size());
  for (size_t i = 0; i < out.size(); ++i) out[static_cast<size_t>(windows.merged_order[i])] = static_cast<int64_t>(i);
  return out;
}

class Qwen25VlVision : public VisionEncoder {
 public:
  Qwen25VlVision(ParamTable& params, const VisionSpec& spec) : spec_(spec) {
    patch_embed_ = make_patch_embed(params, spec);
    for (int64_t i = 0; i < spec.layers; ++i) blocks_.push_back(make_vision_block(params, spec, i, false, true));
  }

  VisionBatch batch(const std::vector<Grid>& grids, at::Device device) const override {
    const Windows windows = make_windows(spec_, grids);
    const auto at = patch_positions(grids, spec_.merge);
    const int64_t unit = spec_.merge * spec_.merge;
    // Patches in window order: each merged token's square moves as one.
    std::vector<int64_t> order;
    std::vector<std::pair<int64_t, int64_t>> positions;
    for (int64_t merged : windows.merged_order) {
      for (int64_t i = 0; i < unit; ++i) {
        order.push_back(merged * unit + i);
        positions.push_back(at[static_cast<size_t>(merged * unit + i)]);
      }
    }
    VisionBatch out;
    out.rope = vision_rope(spec_, positions, patch_embed_.weight->value.scalar_type(), device);
    out.frames = SeqLayout(frame_lengths(grids), device);
    out.windows = SeqLayout(windows.lengths, device);
    out.order = upload(at::tensor(order, at::kLong), device);
    out.raster = upload(at::tensor(raster_of(windows), at::kLong), device);
    return out;
  }

  std::vector<int64_t> raster(const std::vector<Grid>& grids) const override {
    return raster_of(make_windows(spec_, grids));
  }

  std::vector<Piece> pieces(const VisionBatch& batch) const override {
    std::vector<Piece> out;
    out.push_back(patch_embed_.piece(batch.order));
    const auto& full = spec_.full_attention_layers;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const bool sees_all = std::find(full.begin(), full.end(), static_cast<int64_t>(i)) != full.end();
      const std::string name = "vision_encoder.blocks." + std::to_string(i);
      out.push_back({name,
                     {name + "."},
                     [&block = blocks_[i], rope = batch.rope,
                      layout = sees_all ? batch.frames : batch.windows](const Bundle& in) {
                       return Bundle{{"features", block(in.at("features"), rope, layout)}};
                     }});
    }
    return out;
  }

 private:
  VisionSpec spec_;
  PatchEmbed patch_embed_;
  std::vector<VisionBlock> blocks_;
};

class Qwen25Vl : public Model {
 public:
  explicit Qwen25Vl(const ModelSpec& spec) : Model(spec) {
    vision_ = std::make_unique<Qwen25VlVision>(params_, *spec.vision);
    projector_ = make_merger(params_, *spec.vision, spec.backbone.hidden, /*layer_norm=*/false);
    backbone_ = make_decoder(params_, spec.backbone);
  }

  RopePositions positions(int64_t tokens, const std::vector<ImageSpan>& images) const override {
    return mrope_positions(tokens, images, spec_.vision->merge);
  }

  std::vector<std::string> checkpoint_names(const Param& param) const override {
    static const NameParts kParts = {
        {"patch_embed.", "patch_embed.proj."}, {".attn_norm.", ".norm1."},        {".mlp_norm.", ".norm2."},
        {".attn.out.", ".attn.proj."},         {".mlp.gate.", ".mlp.gate_proj."}, {".mlp.up.", ".mlp.up_proj."},
        {".mlp.down.", ".mlp.down_proj."}};
    return vl_checkpoint_names(param, kParts);
  }
};

}  // namespace

std::unique_ptr<Model> make_qwen2_5_vl(const ModelSpec& spec) { return std::make_unique<Qwen25Vl>(spec); }

}  // namespace parvl
