// Small random model directories for tests of checkpoints and generation.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "parvl/models/checkpoint.h"

namespace parvl {

// A folder of its own for each test, removed after it.
class ModelDirTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    root_ = testing::TempDir() + "/parvl_" + info->name() + "_" + std::to_string(::getpid());
    std::filesystem::create_directories(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::string make_folder(const std::string& name) const {
    std::filesystem::create_directories(root_ + "/" + name);
    return root_ + "/" + name;
  }

  std::string root_;
};

// llama, qwen2, qwen2_vl or qwen2_5_vl; patch 4 × 4, the vocabulary and special tokens of examples/easy_vqa/start.
inline Json tiny_config(const std::string& family) {
  Json config = {{"model_type", family},
                 {"hidden_size", 32},
                 {"intermediate_size", 48},
                 {"num_hidden_layers", 2},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 2},
                 {"vocab_size", 384},
                 {"max_position_embeddings", 256},
                 {"rms_norm_eps", 1e-6},
                 {"eos_token_id", 370},
                 {"tie_word_embeddings", false},
                 {"torch_dtype", "float32"},
                 {"image_token_id", 373},
                 {"vision_start_token_id", 371}};
  if (family == "llama" || family == "qwen2") return config;
  config["rope_scaling"] = {{"type", "mrope"}, {"mrope_section", {1, 1, 2}}};
  config["vision_config"] = {
      {"depth", 2},      {"num_heads", 2}, {"patch_size", 4}, {"spatial_merge_size", 2}, {"temporal_patch_size", 2},
      {"in_channels", 3}};
  if (family == "qwen2_vl") {
    config["vision_config"].update({{"embed_dim", 16}, {"hidden_size", 32}, {"mlp_ratio", 2}});
  } else {
    config["vision_config"].update({{"hidden_size", 16},
                                    {"out_hidden_size", 32},
                                    {"intermediate_size", 24},
                                    {"window_size", 16},
                                    {"fullatt_block_indexes", {1}}});
  }
  return config;
}

inline std::unique_ptr<Model> make_model(const Json& config, at::ScalarType type = at::kFloat) {
  auto spec = parse_model_spec(config, "config");
  if (!spec.ok()) throw std::runtime_error(spec.status().ToString());
  auto model = Model::create(*spec);
  model->params().allocate(type, at::kCPU);
  return model;
}

// Weights wide enough that logits spread; returns the model that was written.
inline std::unique_ptr<Model> write_tiny_model(const std::string& dir, const Json& config, SaveOptions options = {}) {
  auto model = make_model(config);
  model->params().initialise(11, 0.25);
  const absl::Status status = save_weights(*model, dir, options);
  if (!status.ok()) throw std::runtime_error(status.ToString());
  return model;
}

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

inline void write_safetensors(const std::string& path, const NamedTensors& tensors) {
  std::vector<TensorEntry> entries;
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor flat = tensor.contiguous();
    const auto dtype = from_scalar_type(flat.scalar_type());
    entries.push_back({name, dtype.ok() ? safetensors_dtype(*dtype) : "I64", flat.sizes().vec(), 0,
                       static_cast<uint64_t>(flat.nbytes())});
    data.append(static_cast<const char*>(flat.data_ptr()), flat.nbytes());
  }
  const std::string header = make_safetensors_header(entries);
  std::ofstream(path, std::ios::binary) << header << data;
}

// What save_weights put into model.safetensors.
inline NamedTensors read_safetensors(const std::string& dir) {
  auto stored = open_weight_files(dir);
  if (!stored.ok()) throw std::runtime_error(stored.status().ToString());
  NamedTensors out;
  for (const auto& [name, tensor] : *stored) {
    const at::ScalarType type = to_scalar_type(*parse_safetensors_dtype(tensor.entry.dtype));
    at::Tensor copy = at::empty(tensor.entry.shape, type);
    std::memcpy(copy.data_ptr(), tensor.file->bytes().data() + tensor.entry.offset, tensor.entry.bytes);
    out.emplace_back(name, copy);
  }
  return out;
}

}  // namespace parvl
