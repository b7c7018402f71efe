// Qwen2-VL: a ViT with full attention in each image (LayerNorm, quick GELU), a merging projector, a Qwen2 decoder with
// M-RoPE.
#include "parvl/models/decoder.h"
#include "parvl/models/vision.h"

namespace parvl {
namespace {

class Qwen2VlVision : public VisionEncoder {
 public:
  Qwen2VlVision(ParamTable& params, const VisionSpec& spec) : spec_(spec) {
    patch_embed_ = make_patch_embed(params, spec);
    for (int64_t i = 0; i < spec.layers; ++i) blocks_.push_back(make_vision_block(params, spec, i, true, false));
  }

  VisionBatch batch(const std::vector<Grid>& grids, at::Device device) const override {
    VisionBatch out;
    out.rope =
        vision_rope(spec_, patch_positions(grids, spec_.merge), patch_embed_.weight->value.scalar_type(), device);
    out.frames = SeqLayout(frame_lengths(grids), device);
    return out;
  }

  std::vector<Piece> pieces(const VisionBatch& batch) const override {
    std::vector<Piece> out;
    out.push_back(patch_embed_.piece(batch.order));
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const std::string name = "vision_encoder.blocks." + std::to_string(i);
      out.push_back(
          {name, {name + "."}, [&block = blocks_[i], rope = batch.rope, layout = batch.frames](const Bundle& in) {
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

class Qwen2Vl : public Model {
 public:
  explicit Qwen2Vl(const ModelSpec& spec) : Model(spec) {
    vision_ = std::make_unique<Qwen2VlVision>(params_, *spec.vision);
    projector_ = make_merger(params_, *spec.vision, spec.backbone.hidden, /*layer_norm=*/true);
    backbone_ = make_decoder(params_, spec.backbone);
  }

  RopePositions positions(int64_t tokens, const std::vector<ImageSpan>& images) const override {
    return mrope_positions(tokens, images, spec_.vision->merge);
  }

  std::vector<std::string> checkpoint_names(const Param& param) const override {
    static const NameParts kParts = {
        {"patch_embed.", "patch_embed.proj."}, {".attn_norm.", ".norm1."}, {".mlp_norm.", ".norm2."},
        {".attn.out.", ".attn.proj."},         {".mlp.up.", ".mlp.fc1."},  {".mlp.down.", ".mlp.fc2."}};
    return vl_checkpoint_names(param, kParts);
  }
};

}  // namespace

std::unique_ptr<Model> make_qwen2_vl(const ModelSpec& spec) { return std::make_unique<Qwen2Vl>(spec); }

}  // namespace parvl
