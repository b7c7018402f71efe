// A model with steps of some hundred milliseconds on a core, samples for it, and what else benchmarks of training
// share.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "parvl/base/check.h"
#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/media/image.h"
#include "parvl/train/trainer.h"

namespace parvl {

inline constexpr char kBenchStart[] = "examples/easy_vqa/start";  // benchmarks run in the checkout

// A folder of this process; the caller removes it.
inline std::string make_bench_folder(const std::string& name) {
  const auto folder = std::filesystem::temp_directory_path() / absl::StrCat("parvl-", name, "-", ::getpid());
  std::filesystem::create_directories(folder);
  return folder.string();
}

inline void write_bench_file(const std::string& path, const std::string& text) {
  PARVL_CHECK(write_file_atomically(path, text).ok(), "cannot write to the scratch folder");
}

// FOLDER/config.json: a Qwen2-VL with so many layers of 256.
inline void write_bench_config(const std::string& folder, int layers) {
  absl::StatusOr<Json> config = read_json_file(std::string(kBenchStart) + "/config.json");
  PARVL_CHECK(config.ok(), "run it in the checkout: examples/easy_vqa/start/config.json must be there");
  config->update({{"hidden_size", 256},
                  {"intermediate_size", 1024},
                  {"num_hidden_layers", layers},
                  {"num_attention_heads", 4},
                  {"num_key_value_heads", 2},
                  {"max_position_embeddings", 4096}});
  (*config)["rope_scaling"]["mrope_section"] = {8, 12, 12};
  (*config)["vision_config"].update(
      {{"depth", 4}, {"embed_dim", 128}, {"hidden_size", 256}, {"num_heads", 4}, {"mlp_ratio", 4}});
  write_bench_file(folder + "/config.json", config->dump());
}

// FOLDER/data.jsonl: a sample for each number of words, two of three with an image when there are images.
inline void write_bench_samples(const std::string& folder, const std::vector<int>& words, bool images) {
  std::string lines;
  for (size_t i = 0; i < words.size(); ++i) {
    Json content = Json::array();
    if (images && i % 3 != 0) {
      Image image{112 + 56 * static_cast<int>(i % 4), 140, {}};
      image.rgb.assign(static_cast<size_t>(image.width * image.height * 3), static_cast<uint8_t>(i * 20));
      const std::string name = absl::StrCat(i, ".png");
      write_bench_file(folder + "/" + name, encode_png(image));
      content.push_back({{"type", "image"}, {"image", name}});
    }
    std::string text = "what";
    for (int left = words[i]; left > 0; --left) text += " red";
    content.push_back({{"type", "text"}, {"text", text}});
    const Json messages = {{{"role", "user"}, {"content", content}},
                           {{"role", "assistant"}, {"content", "a red circle and a blue square"}}};
    absl::StrAppend(&lines, Json{{"messages", messages}}.dump(), "\n");
  }
  write_bench_file(folder + "/data.jsonl", lines);
}

// Over both of these; writes to FOLDER/out.
inline Recipe bench_recipe(const std::string& folder, int64_t micro_batch, int64_t global_batch) {
  Recipe out;
  out.config = folder + "/config.json";
  out.tokenizer = kBenchStart;
  out.data.train = folder + "/data.jsonl";
  out.data.micro_batch = micro_batch;
  out.data.global_batch = global_batch;
  out.train.steps = 1;
  out.train.device = "cpu";
  out.train.out = folder + "/out";
  return out;
}

// A trainer of bench_recipe's FOLDER that is one of `ranks`, which are threads, and says nothing.
inline std::unique_ptr<Trainer> bench_trainer(const Recipe& recipe, const std::string& folder, const Clock& clock,
                                              Communicator& ranks, std::vector<ActionRecord>* actions = nullptr) {
  TrainerEnvironment env;
  env.clock = &clock;
  env.base_dir = folder;
  env.write = [](std::string_view) {};
  env.communicator = &ranks;
  env.loader_threads = 1;
  env.actions = actions;
  absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::create(recipe, env);
  PARVL_CHECK(trainer.ok(), std::string(trainer.status().message()).c_str());
  return *std::move(trainer);
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The last line and the exit code of a benchmark whose figures have a bound.
inline int conclude(bool within, double bound) {
  std::printf("all within %.0f %%: %s\n", bound * 100, within ? "yes" : "no");
  return within ? 0 : 1;
}

}  // namespace parvl
