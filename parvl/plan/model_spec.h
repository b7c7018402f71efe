// What a model is, as plain data: read from a Hugging Face config.json, used by everything that builds, places or costs
// it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parvl/base/json.h"
#include "parvl/base/status.h"

namespace parvl {

enum class DType { kFloat32, kBFloat16, kFloat16, kFloat64 };
const char* to_string(DType dtype);                          // "float32", ...
absl::StatusOr<DType> parse_dtype(const std::string& name);  // also "torch.float32"
int64_t dtype_bytes(DType dtype);

enum class Family { kLlama, kQwen2, kQwen2Vl, kQwen25Vl };

// A ViT of the Qwen2-VL line: patches → blocks (rotary over height and width) → features of `hidden` per patch.
struct VisionSpec {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t intermediate = 0;
  int64_t in_channels = 3;
  int64_t patch = 14;
  int64_t temporal_patch = 2;
  int64_t merge = 2;  // the projector joins merge × merge patches into one token
  double rope_theta = 10000;
  std::string activation;  // quick_gelu | silu | gelu | gelu_pytorch_tanh
  int64_t window = 0;      // pixels a side of the attention window; 0: attention over the whole image
  std::vector<int64_t> full_attention_layers;  // with windows: the layers that see the whole image
  int64_t patch_values() const { return in_channels * temporal_patch * patch * patch; }
  int64_t head_dim() const { return hidden / heads; }
};

struct RopeScaling {
  std::string type = "default";  // default | llama3 | linear
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_max_positions = 8192;
};

// A decoder of the Llama / Qwen2 line.
struct BackboneSpec {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t vocab = 0;
  int64_t max_positions = 0;
  double norm_eps = 1e-6;
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  std::vector<int64_t>
      mrope_section;  // empty: one position a token; else three counts of frequencies (time, height, width)
  bool qkv_bias = false;
  bool out_bias = false;
  bool mlp_bias = false;
  bool tied = false;  // the output matrix is the embedding
};

struct ModelSpec {
  Family family = Family::kLlama;
  std::string model_type;
  BackboneSpec backbone;
  std::optional<VisionSpec> vision;
  DType dtype = DType::kFloat32;  // of the checkpoint's tensors
  double init_std = 0.02;         // of random weights
  int64_t image_token = -1;
  int64_t vision_start_token = -1;
  std::vector<int64_t> eos_tokens;
  Json config;  // the whole config.json, written back with a checkpoint
};

// What an image processor makes, as the model must take it.
struct ImageInputs {
  int64_t patch = 0;
  int64_t temporal_patch = 0;
  int64_t merge = 0;
  int64_t channels = 3;
  int64_t image_token = -1;  // the placeholder that the prompt's images stand on
};
// InvalidArgument naming the field that differs, or that the model takes no images. `dir` is where the processor is
// from.
absl::Status check_image_inputs(const ModelSpec& spec, const ImageInputs& inputs, const std::string& dir);

// Errors: an unknown model_type lists the known ones; a missing field, an inconsistent size (heads that do not divide)
// or a feature that is not built yet (sliding windows, quantised weights, other rotary scalings) is named.
absl::StatusOr<ModelSpec> parse_model_spec(const Json& config, const std::string& name);
// Reads DIR/config.json; also refuses adapter directories.
absl::StatusOr<ModelSpec> load_model_spec(const std::string& dir);

}  // namespace parvl
