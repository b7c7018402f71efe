// config.json → ModelSpec: the spellings that directories have, and a refusal that names its field for all else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "parvl/plan/model_spec.h"

namespace parvl {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// As meta-llama's directories have them.
Json llama() {
  return Json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 128256})");
}

// Flat, as transformers 4 wrote Qwen2-VL.
Json qwen2_vl() {
  return Json::parse(R"({
    "architectures": ["Qwen2VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
    "intermediate_size": 8960, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2_vl",
    "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_sliding_window": false,
    "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536,
                      "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151936})");
}

// Nested, as transformers 5 writes Qwen2.5-VL.
Json qwen2_5_vl() {
  return Json::parse(R"({
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "dtype": "float32",
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "tie_word_embeddings": false,
    "text_config": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
                    "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-06, "eos_token_id": 151645,
                    "max_position_embeddings": 128000, "model_type": "qwen2_5_vl_text", "dtype": "float32",
                    "layer_types": ["full_attention", "full_attention"],
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]}},
    "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                      "in_channels": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2,
                      "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}})");
}

ModelSpec parsed(const Json& config) {
  auto spec = parse_model_spec(config, "DIR/config.json");
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.ok() ? *spec : ModelSpec{};
}

std::string refusal(const Json& config) {
  auto spec = parse_model_spec(config, "DIR/config.json");
  EXPECT_FALSE(spec.ok()) << "accepted: " << config.dump();
  EXPECT_EQ(exit_code(spec.status()), 2) << spec.status();
  return std::string(spec.status().message());
}

// The configuration with a value at a JSON pointer; a null removes the key.
Json with(Json config, const std::string& pointer, const Json& value) {
  const Json::json_pointer at(pointer);
  if (!value.is_null()) {
    config[at] = value;
  } else {
    config.at(at.parent_pointer()).erase(at.back());
  }
  return config;
}

TEST(ModelSpec, Llama) {
  const ModelSpec spec = parsed(llama());
  EXPECT_EQ(spec.family, Family::kLlama);
  EXPECT_EQ(spec.dtype, DType::kBFloat16);
  EXPECT_FALSE(spec.vision.has_value());
  EXPECT_THAT(spec.eos_tokens, ElementsAre(128001, 128008, 128009));
  const BackboneSpec& b = spec.backbone;
  EXPECT_EQ(b.layers, 16);
  EXPECT_EQ(b.hidden, 2048);
  EXPECT_EQ(b.heads, 32);
  EXPECT_EQ(b.kv_heads, 8);
  EXPECT_EQ(b.head_dim, 64);
  EXPECT_EQ(b.intermediate, 8192);
  EXPECT_EQ(b.vocab, 128256);
  EXPECT_EQ(b.max_positions, 131072);
  EXPECT_EQ(b.norm_eps, 1e-5);
  EXPECT_EQ(b.rope_theta, 500000);
  EXPECT_EQ(b.rope_scaling.type, "llama3");
  EXPECT_EQ(b.rope_scaling.factor, 32);
  EXPECT_EQ(b.rope_scaling.original_max_positions, 8192);
  EXPECT_TRUE(b.tied);
  EXPECT_FALSE(b.qkv_bias);
  EXPECT_FALSE(b.mlp_bias);
  EXPECT_EQ(spec.config, llama()) << "is written back with a checkpoint";
}

TEST(ModelSpec, LlamaOptions) {
  EXPECT_TRUE(parsed(with(llama(), "/attention_bias", true)).backbone.out_bias);
  EXPECT_TRUE(parsed(with(llama(), "/mlp_bias", true)).backbone.mlp_bias);
  EXPECT_EQ(parsed(with(llama(), "/num_key_value_heads", nullptr)).backbone.kv_heads, 32);
  EXPECT_EQ(parsed(with(llama(), "/head_dim", 96)).backbone.head_dim, 96);
  EXPECT_EQ(parsed(with(llama(), "/head_dim", nullptr)).backbone.head_dim, 64);
  EXPECT_THAT(parsed(with(llama(), "/eos_token_id", 5)).eos_tokens, ElementsAre(5));
  EXPECT_THAT(parsed(with(llama(), "/eos_token_id", nullptr)).eos_tokens, ElementsAre());
  EXPECT_EQ(parsed(with(llama(), "/hidden_size", 2048.0)).backbone.hidden, 2048);
  EXPECT_EQ(parsed(with(llama(), "/torch_dtype", "torch.float16")).dtype, DType::kFloat16);
  EXPECT_EQ(parsed(with(llama(), "/torch_dtype", nullptr)).dtype, DType::kFloat32);
}

TEST(ModelSpec, Qwen2HasBiases) {
  Json config = with(llama(), "/model_type", "qwen2");
  config.erase("rope_scaling");
  config.erase("rope_theta");
  const ModelSpec spec = parsed(config);
  EXPECT_EQ(spec.family, Family::kQwen2);
  EXPECT_TRUE(spec.backbone.qkv_bias);
  EXPECT_FALSE(spec.backbone.out_bias);
  EXPECT_EQ(spec.backbone.rope_theta, 10000);
}

TEST(ModelSpec, Qwen2Vl) {
  const ModelSpec spec = parsed(qwen2_vl());
  EXPECT_EQ(spec.family, Family::kQwen2Vl);
  EXPECT_EQ(spec.image_token, 151655);
  EXPECT_EQ(spec.vision_start_token, 151652);
  EXPECT_THAT(spec.backbone.mrope_section, ElementsAre(16, 24, 24));
  EXPECT_EQ(spec.backbone.head_dim, 128);
  ASSERT_TRUE(spec.vision.has_value());
  const VisionSpec& v = *spec.vision;
  EXPECT_EQ(v.layers, 32);
  EXPECT_EQ(v.hidden, 1280);
  EXPECT_EQ(v.heads, 16);
  EXPECT_EQ(v.intermediate, 5120);
  EXPECT_EQ(v.activation, "quick_gelu");
  EXPECT_EQ(v.window, 0);
  EXPECT_EQ(v.patch_values(), 3 * 2 * 14 * 14);
  EXPECT_EQ(parsed(with(qwen2_vl(), "/vision_config/patch_size", nullptr)).vision->patch, 14);
}

TEST(ModelSpec, Qwen25Vl) {
  const ModelSpec spec = parsed(qwen2_5_vl());
  EXPECT_EQ(spec.family, Family::kQwen25Vl);
  EXPECT_FALSE(spec.backbone.tied);
  EXPECT_THAT(spec.eos_tokens, ElementsAre(151645));
  ASSERT_TRUE(spec.vision.has_value());
  EXPECT_EQ(spec.vision->hidden, 1280);
  EXPECT_EQ(spec.vision->intermediate, 3420);
  EXPECT_EQ(spec.vision->window, 112);
  EXPECT_THAT(spec.vision->full_attention_layers, ElementsAre(7, 15, 23, 31));
  EXPECT_THAT(
      parsed(with(qwen2_5_vl(), "/vision_config/fullatt_block_indexes", Json::array())).vision->full_attention_layers,
      ElementsAre());
}

TEST(ModelSpec, OldAndNewSpellingsOfRotaryParametersAgree) {
  // transformers 4: rope_theta beside rope_scaling with "type" or "rope_type"; 5: all inside rope_parameters.
  Json old = llama(), renamed = llama(), moved = llama();
  renamed["rope_scaling"].erase("rope_type");
  renamed["rope_scaling"]["type"] = "llama3";
  moved["rope_parameters"] = moved["rope_scaling"];
  moved["rope_parameters"]["rope_theta"] = moved["rope_theta"];
  moved.erase("rope_scaling");
  moved.erase("rope_theta");
  for (const Json& config : {old, renamed, moved}) {
    const BackboneSpec b = parsed(config).backbone;
    EXPECT_EQ(b.rope_theta, 500000);
    EXPECT_EQ(b.rope_scaling.type, "llama3");
    EXPECT_EQ(b.rope_scaling.factor, 32);
    EXPECT_EQ(b.rope_scaling.low_freq_factor, 1);
    EXPECT_EQ(b.rope_scaling.high_freq_factor, 4);
  }
  const BackboneSpec plain = parsed(with(llama(), "/rope_scaling", nullptr)).backbone;
  EXPECT_EQ(plain.rope_scaling.type, "default");
  Json null_scaling = llama();
  null_scaling["rope_scaling"] = nullptr;
  EXPECT_EQ(parsed(null_scaling).backbone.rope_scaling.type, "default");
  const BackboneSpec linear = parsed(with(llama(), "/rope_scaling", {{"type", "linear"}, {"factor", 2.5}})).backbone;
  EXPECT_EQ(linear.rope_scaling.type, "linear");
  EXPECT_EQ(linear.rope_scaling.factor, 2.5);
  EXPECT_EQ(parsed(qwen2_vl()).backbone.rope_scaling.type, "default") << "mrope is the default rotation on three axes";
}

struct Refusal {
  Json config;
  std::string pointer;
  Json value;
  std::vector<std::string> says;
};

void expect_refusals(const std::vector<Refusal>& cases) {
  for (const Refusal& c : cases) {
    const std::string message = refusal(with(c.config, c.pointer, c.value));
    EXPECT_THAT(message, testing::StartsWith("DIR/config.json: "));
    EXPECT_LT(message.size(), 500u);
    for (const std::string& part : c.says) EXPECT_THAT(message, HasSubstr(part)) << c.pointer << " = " << c.value;
  }
}

TEST(ModelSpec, RefusesWhatIsNotBuilt) {
  const Json qwen2 = with(with(llama(), "/model_type", "qwen2"), "/rope_scaling", nullptr);
  expect_refusals({
      {llama(), "/model_type", "mamba2", {"'mamba2'", "llama, qwen2, qwen2_vl, qwen2_5_vl"}},
      {llama(), "/model_type", nullptr, {"model_type"}},
      {llama(), "/quantization_config", {{"quant_method", "gptq"}}, {"quantization_config", "quantised"}},
      {llama(), "/compression_config", {{"format", "x"}}, {"compression_config"}},
      {qwen2_5_vl(), "/text_config/quantization_config", {{"quant_method", "awq"}}, {"quantization_config"}},
      {qwen2, "/use_sliding_window", true, {"use_sliding_window"}},
      {qwen2, "/layer_types", {"full_attention", "sliding_attention"}, {"layer_types", "sliding_attention"}},
      {llama(), "/hidden_act", "gelu", {"gelu"}},
      {llama(), "/attention_dropout", 0.1, {"attention_dropout", "0.1"}},
      {llama(), "/rope_scaling/rope_type", "yarn", {"yarn"}},
      {llama(), "/partial_rotary_factor", 0.5, {"partial_rotary_factor", "0.5"}},
      {llama(), "/rope_scaling/partial_rotary_factor", 0.5, {"partial_rotary_factor", "0.5"}},
      {qwen2_vl(), "/vision_config/hidden_act", "relu", {"vision_config", "hidden_act", "relu"}},
      {qwen2_5_vl(), "/vision_config/hidden_act", "gelu", {"vision_config", "hidden_act", "gelu"}},
      {llama(), "/torch_dtype", "int8", {"int8", "float32, bfloat16, float16, float64"}},
  });
}

TEST(ModelSpec, RefusesSizesThatDoNotFit) {
  expect_refusals({
      {llama(), "/num_key_value_heads", 5, {"num_attention_heads", "32", "num_key_value_heads", "5"}},
      {with(llama(), "/head_dim", nullptr), "/hidden_size", 2050, {"hidden_size", "2050", "num_attention_heads"}},
      {llama(), "/head_dim", 63, {"head size 63", "odd"}},
      {qwen2_vl(), "/rope_scaling/mrope_section", {16, 24}, {"mrope_section", "64"}},
      {qwen2_vl(), "/rope_scaling/mrope_section", {16, 24, 23}, {"mrope_section", "64"}},
      {qwen2_vl(), "/rope_scaling/mrope_section", {-16, 40, 40}, {"mrope_section"}},
      {qwen2_vl(), "/rope_scaling/mrope_section", {4611686018427387904, 4611686018427387904, 64}, {"mrope_section"}},
      {qwen2_vl(), "/rope_scaling/mrope_section", nullptr, {"mrope_section"}},
      {llama(), "/rope_scaling/mrope_section", {8, 12, 12}, {"mrope_section", "text-only"}},
      {qwen2_vl(), "/vision_config/num_heads", 24, {"vision", "1280", "num_heads", "24"}},
      {qwen2_vl(), "/vision_config/num_heads", 640, {"vision head size 2", "4"}},
      {qwen2_vl(), "/vision_config/hidden_size", 1280, {"hidden_size", "1280", "1536"}},
      {qwen2_5_vl(), "/vision_config/out_hidden_size", 1, {"out_hidden_size", "2048"}},
      {qwen2_5_vl(), "/vision_config/window_size", 20, {"window_size", "20", "28"}},
      {qwen2_vl(), "/vision_config", nullptr, {"vision_config"}},
      {qwen2_vl(), "/image_token_id", 151936, {"image_token_id", "151936"}},
      {qwen2_vl(), "/image_token_id", -1, {"image_token_id"}},
      {llama(), "/rope_scaling/factor", 0.5, {"factor"}},
      {llama(), "/rope_scaling/high_freq_factor", 1.0, {"factor"}},
      {llama(), "/rope_theta", 1, {"rope_theta"}},
      {llama(), "/rope_theta", -5.0, {"rope_theta"}},
      {llama(), "/rms_norm_eps", -1e-6, {"rms_norm_eps"}},
      {llama(), "/initializer_range", -1, {"initializer_range"}},
      {llama(), "/rope_scaling/original_max_position_embeddings", 0, {"original_max_position_embeddings"}},
      {llama(), "/rope_scaling/low_freq_factor", 0, {"low_freq_factor"}},
  });
}

TEST(ModelSpec, RefusesMissingFieldsByName) {
  for (const char* key :
       {"num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"}) {
    expect_refusals({{llama(), std::string("/") + key, nullptr, {std::string("'") + key + "' is missing"}},
                     {qwen2_5_vl(), std::string("/text_config/") + key, nullptr, {key}}});
  }
  for (const char* key : {"depth", "embed_dim", "num_heads"}) {
    expect_refusals({{qwen2_vl(), std::string("/vision_config/") + key, nullptr, {"vision_config: ", key}}});
  }
  for (const char* key : {"depth", "hidden_size", "num_heads", "intermediate_size"}) {
    expect_refusals({{qwen2_5_vl(), std::string("/vision_config/") + key, nullptr, {"vision_config: ", key}}});
  }
}

// Every number of a configuration replaced by what is none, or none that a model has.
void refuse_bad_numbers(const Json& config, const std::string& pointer, const Json& node) {
  for (const auto& [key, value] : node.items()) {
    const std::string at = pointer + "/" + key;
    if (value.is_object()) {
      refuse_bad_numbers(config, at, value);
    } else if (value.is_number_integer()) {
      for (const Json& bad :
           {Json("12"), Json(true), Json(Json::object()), Json(1.5), Json(1e300), Json(UINT64_MAX), Json(INT64_MIN)}) {
        auto spec = parse_model_spec(with(config, at, bad), "c");
        if (spec.ok()) {
          // Only where a number is allowed, or the field is not read at all.
          EXPECT_THAT(key, testing::AnyOf("mlp_ratio", "bos_token_id", "vision_end_token_id", "vision_token_id",
                                          "video_token_id", "max_window_layers", "sliding_window", "pretraining_tp",
                                          "spatial_patch_size", "original_max_position_embeddings"))
              << at << " = " << bad;
        } else {
          EXPECT_THAT(std::string(spec.status().message()), HasSubstr(key)) << at << " = " << bad;
          EXPECT_EQ(exit_code(spec.status()), 2);
        }
      }
      for (const Json& bad : {Json(0), Json(-1)}) {  // no crash, whatever is decided
        (void)parse_model_spec(with(config, at, bad), "c");
      }
    }
  }
}

TEST(ModelSpec, RefusesWrongTypesAndHugeNumbersByName) {
  for (const Json& config : {llama(), qwen2_vl(), qwen2_5_vl()}) refuse_bad_numbers(config, "", config);
  expect_refusals({
      {llama(), "/rms_norm_eps", "small", {"rms_norm_eps", "number"}},
      {llama(), "/rope_theta", "big", {"rope_theta"}},
      {llama(), "/rope_theta", 1e300, {"rope_theta"}},
      {llama(), "/rope_scaling", "llama3", {"rope_scaling"}},
      {llama(), "/rope_parameters", {1, 2}, {"rope_parameters"}},
      {llama(), "/rope_scaling/rope_type", 3, {"rope_type"}},
      {llama(), "/tie_word_embeddings", "yes", {"tie_word_embeddings"}},
      {llama(), "/attention_bias", 1, {"attention_bias"}},
      {llama(), "/hidden_act", 1, {"hidden_act"}},
      {llama(), "/torch_dtype", 16, {"torch_dtype"}},
      {llama(), "/model_type", 1, {"model_type"}},
      {llama(), "/eos_token_id", "</s>", {"eos_token_id"}},
      {llama(), "/eos_token_id", {1, "x"}, {"eos_token_id"}},
      {llama(), "/eos_token_id", {1, 128256}, {"eos_token_id", "128256", "vocab_size"}},
      {qwen2_vl(), "/eos_token_id", 151936, {"eos_token_id", "vocab_size"}},
      {llama(), "/eos_token_id", Json::array({UINT64_MAX}), {"eos_token_id"}},
      {llama(), "/text_config", {1}, {"text_config"}},
      {qwen2_vl(), "/vision_config", {1}, {"vision_config"}},
      {qwen2_vl(), "/vision_config/mlp_ratio", "4", {"mlp_ratio"}},
      {qwen2_vl(), "/vision_config/mlp_ratio", 0, {"mlp_ratio"}},
      {qwen2_vl(), "/vision_config/mlp_ratio", 1e9, {"mlp_ratio"}},
      {qwen2_vl(), "/vision_config/mlp_ratio", 0.0001, {"mlp_ratio"}},
      {qwen2_vl(), "/vision_config/hidden_act", 4, {"hidden_act"}},
      {qwen2_5_vl(), "/vision_config/fullatt_block_indexes", "all", {"fullatt_block_indexes"}},
      {qwen2_5_vl(), "/vision_config/fullatt_block_indexes", {1.5}, {"fullatt_block_indexes"}},
      {qwen2_5_vl(),
       "/vision_config/fullatt_block_indexes",
       Json(std::vector<int>(5000, 1)),
       {"fullatt_block_indexes"}},
  });
  EXPECT_THAT(refusal(Json::array()), HasSubstr("not a JSON object"));
  EXPECT_THAT(refusal(Json("llama")), HasSubstr("not a JSON object"));
}

// Text of a file must not get into a terminal as it is.
TEST(ModelSpec, MessagesArePrintable) {
  for (const char* key : {"/model_type", "/torch_dtype", "/hidden_act"}) {
    const std::string message = refusal(with(llama(), key, std::string("\x1b[31m\n") + std::string(5000, 'x')));
    EXPECT_LT(message.size(), 500u) << key;
    EXPECT_THAT(message, AllOf(Not(HasSubstr("\x1b")), Not(HasSubstr("\n")))) << key;
  }
}

class ModelSpecFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = testing::TempDir() + "/model_spec_" + std::to_string(::getpid());
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  void write(const std::string& name, const std::string& text) { std::ofstream(dir_ + "/" + name) << text; }
  std::string refusal() {
    auto spec = load_model_spec(dir_);
    EXPECT_FALSE(spec.ok());
    EXPECT_EQ(exit_code(spec.status()), 2) << spec.status();
    return std::string(spec.status().message());
  }
  std::string dir_;
};

TEST_F(ModelSpecFiles, LoadsADirectory) {
  write("config.json", llama().dump());
  auto spec = load_model_spec(dir_);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->backbone.hidden, 2048);
}

TEST_F(ModelSpecFiles, RefusesWhatIsNoModelDirectory) {
  EXPECT_THAT(refusal(), HasSubstr("config.json"));
  write("config.json", "{\"model_type\": ");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("config.json"), HasSubstr("not valid JSON")));
  write("config.json", llama().dump());
  write("adapter_config.json", "{}");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("adapter_config.json"), HasSubstr("merge")));
}

}  // namespace
}  // namespace parvl
