#include "parvl/plan/model_spec.h"

#include <unistd.h>

#include <algorithm>

#include "parvl/base/file.h"
#include "parvl/base/text.h"

namespace parvl {

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat64:
      return "float64";
  }
  return "?";
}

absl::StatusOr<DType> parse_dtype(const std::string& name) {
  const std::string bare = name.rfind("torch.", 0) == 0 ? name.substr(6) : name;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    if (bare == to_string(dtype)) return dtype;
  }
  return invalid("dtype ", excerpt(name), " is not one of float32, bfloat16, float16, float64");
}

int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

namespace {

// Reads fields of one JSON object; the first error is kept and the rest become no-ops, so that a list of fields reads
// as one.
class Fields {
 public:
  explicit Fields(const Json& object) : object_(object) {}

  void required(const char* key, int64_t& out, int64_t low, int64_t high) {
    if (!status_.ok()) return;
    if (!object_.contains(key) || object_[key].is_null()) {
      status_ = invalid("'", key, "' is missing");
      return;
    }
    optional(key, out, low, high);
  }

  void optional(const char* key, int64_t& out, int64_t low, int64_t high) {
    if (!status_.ok()) return;
    auto value = json_value<int64_t>(object_, key, out);
    if (!value.ok()) {
      status_ = value.status();
    } else if (*value < low || *value > high) {
      status_ = invalid("'", key, "' is ", *value, ", outside ", low, "..", high);
    } else {
      out = *value;
    }
  }

  void optional(const char* key, double& out, double low, double high) {
    double value = out;
    optional(key, value);
    if (!status_.ok()) return;
    if (!(value >= low && value <= high)) {
      status_ = invalid("'", key, "' is ", value, ", outside ", low, "..", high);
    } else {
      out = value;
    }
  }

  template <typename T>
  void optional(const char* key, T& out) {
    if (!status_.ok()) return;
    auto value = json_value<T>(object_, key, out);
    if (!value.ok()) {
      status_ = value.status();
    } else {
      out = *value;
    }
  }

  void fail(const absl::Status& status) {
    if (status_.ok()) status_ = status;
  }
  const Json& object() const { return object_; }
  const absl::Status& status() const { return status_; }

 private:
  const Json& object_;
  absl::Status status_;
};

constexpr int64_t kMaxSize = 1 << 22;  // any width or count beyond this is a damaged file, not a model

bool given(const Json& object, const char* key) { return object.contains(key) && !object[key].is_null(); }

// An absent or null object is an empty one.
absl::StatusOr<Json> object_or_empty(const Json& parent, const char* key) {
  if (!given(parent, key)) return Json::object();
  if (!parent[key].is_object()) return invalid("'", key, "' must be an object, found ", parent[key].type_name());
  return parent[key];
}

absl::StatusOr<std::vector<int64_t>> integer_list(const Json& parent, const char* key) {
  std::vector<int64_t> out;
  if (!given(parent, key)) return out;
  const Json list = parent[key].is_array() ? parent[key] : Json::array({parent[key]});
  if (list.size() > 4096) return invalid("'", key, "' has ", list.size(), " entries, more than any model");
  for (const Json& item : list) {
    if (!item.is_number_integer() || item > (1 << 30) || item < 0)
      return invalid("'", key, "' must be a list of whole numbers from 0");
    out.push_back(item.get<int64_t>());
  }
  return out;
}

absl::Status parse_rope(const Json& text, BackboneSpec& spec) {
  // transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters with both inside.
  PARVL_ASSIGN_OR_RETURN(Json rope, object_or_empty(text, "rope_parameters"));
  if (rope.empty()) {
    PARVL_ASSIGN_OR_RETURN(rope, object_or_empty(text, "rope_scaling"));
  }
  for (const Json* level : std::initializer_list<const Json*>{&text, &rope}) {
    Fields fields(*level);
    double share = 1;
    fields.optional("rope_theta", spec.rope_theta, 1 + 1e-6, 1e15);
    fields.optional("partial_rotary_factor", share);
    if (share != 1) fields.fail(not_available_yet(absl::StrCat("'partial_rotary_factor' ", share, " (only 1 is)")));
    PARVL_RETURN_IF_ERROR(fields.status());
  }
  PARVL_ASSIGN_OR_RETURN(std::string type, json_value<std::string>(rope, "type", "default"));
  PARVL_ASSIGN_OR_RETURN(type, json_value<std::string>(rope, "rope_type", type));
  PARVL_ASSIGN_OR_RETURN(spec.mrope_section, integer_list(rope, "mrope_section"));
  if (type == "mrope") type = "default";
  RopeScaling& scaling = spec.rope_scaling;
  scaling.type = type;
  if (type == "default") return absl::OkStatus();
  if (type != "llama3" && type != "linear") {
    return not_available_yet(absl::StrCat("the rotary scaling ", excerpt(type), " (default, linear and llama3 are)"));
  }
  Fields fields(rope);
  fields.optional("factor", scaling.factor, 1, 1e6);
  fields.optional("low_freq_factor", scaling.low_freq_factor, 1e-6, 1e6);
  fields.optional("high_freq_factor", scaling.high_freq_factor, 1e-6, 1e6);
  fields.optional("original_max_position_embeddings", scaling.original_max_positions, 1, 1 << 28);
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    fields.fail(invalid("'high_freq_factor' ", scaling.high_freq_factor, " must be over 'low_freq_factor' ",
                        scaling.low_freq_factor));
  }
  return fields.status();
}

absl::Status parse_backbone(const Json& text, Family family, BackboneSpec& spec) {
  Fields fields(text);
  fields.required("num_hidden_layers", spec.layers, 1, 4096);
  fields.required("hidden_size", spec.hidden, 1, kMaxSize);
  fields.required("num_attention_heads", spec.heads, 1, kMaxSize);
  spec.kv_heads = spec.heads;
  fields.optional("num_key_value_heads", spec.kv_heads, 1, kMaxSize);
  fields.required("intermediate_size", spec.intermediate, 1, kMaxSize);
  fields.required("vocab_size", spec.vocab, 1, 1 << 24);
  spec.max_positions = 32768;
  fields.optional("max_position_embeddings", spec.max_positions, 1, 1 << 28);
  fields.optional("rms_norm_eps", spec.norm_eps, 0, 1);
  PARVL_RETURN_IF_ERROR(fields.status());
  spec.head_dim = spec.hidden / spec.heads;
  fields.optional("head_dim", spec.head_dim, 1, 1024);
  std::string activation = "silu";
  fields.optional("hidden_act", activation);
  bool sliding = false;
  double dropout = 0;
  fields.optional("use_sliding_window", sliding);
  fields.optional("attention_dropout", dropout);
  if (family == Family::kLlama) {
    fields.optional("attention_bias", spec.qkv_bias);
    spec.out_bias = spec.qkv_bias;
    fields.optional("mlp_bias", spec.mlp_bias);
    spec.rope_theta = 10000;
  } else {
    spec.qkv_bias = true;
    spec.rope_theta = family == Family::kQwen2 ? 10000 : 1000000;
  }
  PARVL_RETURN_IF_ERROR(fields.status());
  PARVL_RETURN_IF_ERROR(parse_rope(text, spec));
  if (activation != "silu") return not_available_yet("the LLM activation " + excerpt(activation) + " (silu is)");
  if (sliding) return not_available_yet("sliding-window attention (use_sliding_window: true)");
  if (given(text, "layer_types")) {
    for (const Json& kind : text["layer_types"]) {
      if (kind != "full_attention")
        return not_available_yet("a layer of 'layer_types' other than full_attention, " + excerpt(kind.dump()) + ",");
    }
  }
  if (dropout != 0) return invalid("'attention_dropout' is ", dropout, "; only 0 is supported");
  if (spec.hidden % spec.heads != 0 && !given(text, "head_dim")) {
    return invalid("'hidden_size' ", spec.hidden, " is not divisible by 'num_attention_heads' ", spec.heads);
  }
  if (spec.heads % spec.kv_heads != 0) {
    return invalid("'num_attention_heads' ", spec.heads, " is not divisible by 'num_key_value_heads' ", spec.kv_heads);
  }
  if (spec.head_dim % 2 != 0)
    return invalid("the head size ", spec.head_dim, " is odd; rotary positions need an even one");
  if (!spec.mrope_section.empty()) {
    int64_t sum = 0;
    for (int64_t part : spec.mrope_section) sum += part > 0 && part <= 1024 ? part : 1 << 20;
    if (spec.mrope_section.size() != 3 || sum != spec.head_dim / 2) {
      return invalid("'mrope_section' must be three counts that sum to half the head size, ", spec.head_dim / 2);
    }
  }
  return absl::OkStatus();
}

absl::Status check_vision_activation(Family family, const std::string& name) {
  std::vector<std::string> known = {"silu"};  // Qwen2.5-VL's MLP is gated
  if (family == Family::kQwen2Vl) known = {"quick_gelu", "silu", "gelu", "gelu_pytorch_tanh"};
  if (std::find(known.begin(), known.end(), name) != known.end()) return absl::OkStatus();
  return not_available_yet("'hidden_act' " + excerpt(name));
}

absl::Status parse_vision(const Json& vision, Family family, VisionSpec& spec) {
  Fields fields(vision);
  fields.required("depth", spec.layers, 1, 4096);
  fields.required(family == Family::kQwen2Vl ? "embed_dim" : "hidden_size", spec.hidden, 1, kMaxSize);
  fields.required("num_heads", spec.heads, 1, kMaxSize);
  fields.optional(vision.contains("in_chans") ? "in_chans" : "in_channels", spec.in_channels, 1, 64);
  fields.optional(
      vision.contains("spatial_patch_size") && !vision.contains("patch_size") ? "spatial_patch_size" : "patch_size",
      spec.patch, 1, 1024);
  fields.optional("temporal_patch_size", spec.temporal_patch, 1, 16);
  fields.optional("spatial_merge_size", spec.merge, 1, 16);
  spec.activation = family == Family::kQwen2Vl ? "quick_gelu" : "silu";
  fields.optional("hidden_act", spec.activation);
  if (family == Family::kQwen2Vl) {
    double ratio = 4;
    fields.optional("mlp_ratio", ratio);
    if (!(ratio > 0 && ratio <= 64)) fields.fail(invalid("'mlp_ratio' is ", ratio, ", outside (0, 64]"));
    if (fields.status().ok()) spec.intermediate = static_cast<int64_t>(static_cast<double>(spec.hidden) * ratio);
    if (fields.status().ok() && spec.intermediate < 1)
      fields.fail(invalid("'mlp_ratio' ", ratio, " leaves the MLP no width"));
  } else {
    fields.required("intermediate_size", spec.intermediate, 1, kMaxSize);
    spec.window = 112;
    fields.optional("window_size", spec.window, 1, 1 << 16);
    auto full = integer_list(vision, "fullatt_block_indexes");
    if (full.ok()) {
      spec.full_attention_layers =
          vision.contains("fullatt_block_indexes") ? *full : std::vector<int64_t>{7, 15, 23, 31};
    } else {
      fields.fail(full.status());
    }
  }
  PARVL_RETURN_IF_ERROR(fields.status());
  PARVL_RETURN_IF_ERROR(check_vision_activation(family, spec.activation));
  PARVL_ASSIGN_OR_RETURN(const Json rope, object_or_empty(vision, "rope_parameters"));
  Fields rope_fields(rope);
  rope_fields.optional("rope_theta", spec.rope_theta, 1 + 1e-6, 1e15);
  PARVL_RETURN_IF_ERROR(rope_fields.status());
  if (spec.hidden % spec.heads != 0) {
    return invalid("the vision width ", spec.hidden, " is not divisible by 'num_heads' ", spec.heads);
  }
  if (spec.head_dim() % 4 != 0) {
    return invalid("the vision head size ", spec.head_dim(),
                   " is not divisible by 4, which two-axis rotary positions need");
  }
  if (spec.window > 0 && spec.window / spec.merge / spec.patch < 1) {
    return invalid("'window_size' ", spec.window, " is smaller than one merged patch of ", spec.merge * spec.patch,
                   " pixels");
  }
  return absl::OkStatus();
}

absl::Status parse_family(const std::string& type, Family& family) {
  if (type == "llama") {
    family = Family::kLlama;
  } else if (type == "qwen2") {
    family = Family::kQwen2;
  } else if (type == "qwen2_vl") {
    family = Family::kQwen2Vl;
  } else if (type == "qwen2_5_vl") {
    family = Family::kQwen25Vl;
  } else {
    return invalid("model_type ", excerpt(type), " is not supported; supported: llama, qwen2, qwen2_vl, qwen2_5_vl");
  }
  return absl::OkStatus();
}

absl::Status check_unquantised(const Json& config) {
  for (const char* key : {"quantization_config", "compression_config"}) {
    if (!given(config, key)) continue;
    return invalid("the directory holds quantised weights ('", key,
                   "'), which are not supported; use the original weights");
  }
  return absl::OkStatus();
}

absl::Status parse_multimodal(const Json& config, ModelSpec& spec) {
  if (!given(config, "vision_config")) return invalid("'vision_config' is missing");
  PARVL_ASSIGN_OR_RETURN(const Json json, object_or_empty(config, "vision_config"));
  VisionSpec vision;
  PARVL_RETURN_IF_ERROR(with_context(parse_vision(json, spec.family, vision), "vision_config"));
  const char* out_key = spec.family == Family::kQwen2Vl ? "hidden_size" : "out_hidden_size";
  int64_t out = spec.backbone.hidden;
  PARVL_ASSIGN_OR_RETURN(out, json_value<int64_t>(json, out_key, out));
  if (out != spec.backbone.hidden) {
    return invalid("the vision encoder's '", out_key, "' ", out, " differs from the LLM's hidden size ",
                   spec.backbone.hidden);
  }
  spec.vision = std::move(vision);
  Fields fields(config);
  spec.image_token = 151655;
  spec.vision_start_token = 151652;
  fields.optional("image_token_id", spec.image_token, 0, spec.backbone.vocab - 1);
  fields.optional("vision_start_token_id", spec.vision_start_token, 0, spec.backbone.vocab - 1);
  if (spec.backbone.mrope_section.empty())
    fields.fail(invalid("'mrope_section' is missing from the rotary parameters"));
  return fields.status();
}

absl::Status parse_all(const Json& config, ModelSpec& spec) {
  if (!config.is_object()) return invalid("the configuration is not a JSON object");
  PARVL_RETURN_IF_ERROR(check_unquantised(config));
  PARVL_ASSIGN_OR_RETURN(spec.model_type, json_value<std::string>(config, "model_type", ""));
  PARVL_RETURN_IF_ERROR(parse_family(spec.model_type, spec.family));
  // Older multimodal configurations keep the LLM's fields at the top.
  PARVL_ASSIGN_OR_RETURN(Json text, object_or_empty(config, "text_config"));
  if (text.empty()) text = config;
  PARVL_RETURN_IF_ERROR(check_unquantised(text));
  PARVL_RETURN_IF_ERROR(parse_backbone(text, spec.family, spec.backbone));
  bool tied = false, tied_text = false;
  PARVL_ASSIGN_OR_RETURN(tied, json_value<bool>(config, "tie_word_embeddings", false));
  PARVL_ASSIGN_OR_RETURN(tied_text, json_value<bool>(text, "tie_word_embeddings", false));
  spec.backbone.tied = tied || tied_text;

  for (const Json* level : std::initializer_list<const Json*>{&text, &config}) {
    for (const char* key : {"torch_dtype", "dtype"}) {
      PARVL_ASSIGN_OR_RETURN(const std::string name, json_value<std::string>(*level, key, to_string(spec.dtype)));
      auto dtype = parse_dtype(name);
      if (!dtype.ok()) return with_context(dtype.status(), absl::StrCat("'", key, "'"));
      spec.dtype = *dtype;
    }
  }
  Fields fields(text);
  fields.optional("initializer_range", spec.init_std, 0, 1e3);
  PARVL_RETURN_IF_ERROR(fields.status());
  PARVL_ASSIGN_OR_RETURN(spec.eos_tokens, integer_list(text, "eos_token_id"));
  if (given(config, "eos_token_id")) {
    PARVL_ASSIGN_OR_RETURN(spec.eos_tokens, integer_list(config, "eos_token_id"));
  }
  for (const int64_t id : spec.eos_tokens) {
    if (id >= spec.backbone.vocab) return invalid("'eos_token_id' ", id, " is not below 'vocab_size'");
  }
  if (spec.family == Family::kQwen2Vl || spec.family == Family::kQwen25Vl) {
    PARVL_RETURN_IF_ERROR(parse_multimodal(config, spec));
  } else if (!spec.backbone.mrope_section.empty()) {
    return invalid("'mrope_section' does not belong in a text-only model");
  }
  spec.config = config;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelSpec> parse_model_spec(const Json& config, const std::string& name) {
  ModelSpec spec;
  PARVL_RETURN_IF_ERROR(with_context(parse_all(config, spec), name));
  return spec;
}

absl::StatusOr<ModelSpec> load_model_spec(const std::string& dir) {
  if (::access((dir + "/adapter_config.json").c_str(), F_OK) == 0) {
    return invalid(dir,
                   " is an adapter (adapter_config.json), which is not supported; merge it into its base model first");
  }
  PARVL_ASSIGN_OR_RETURN(Json config, read_json_file(dir + "/config.json"));
  return parse_model_spec(config, dir + "/config.json");
}

absl::Status check_image_inputs(const ModelSpec& spec, const ImageInputs& inputs, const std::string& dir) {
  if (!spec.vision) {
    return invalid(
        dir,
        " has an image processor, but the configuration describes a text-only model; remove the file that is wrong");
  }
  const auto check = [&](const char* key, int64_t processor, int64_t model) {
    if (processor == model) return absl::OkStatus();
    return invalid(dir, ": '", key, "' is ", processor, " for the image processor and ", model,
                   " in the model's configuration");
  };
  PARVL_RETURN_IF_ERROR(check("patch_size", inputs.patch, spec.vision->patch));
  PARVL_RETURN_IF_ERROR(check("temporal_patch_size", inputs.temporal_patch, spec.vision->temporal_patch));
  PARVL_RETURN_IF_ERROR(check("merge_size", inputs.merge, spec.vision->merge));
  PARVL_RETURN_IF_ERROR(check("in_channels", inputs.channels, spec.vision->in_channels));
  return check("image_token_id", inputs.image_token, spec.image_token);
}

}  // namespace parvl
