// A small model directory and a data set of real PNG files, for the tests of loading data.
#pragma once

#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "parvl/base/json.h"
#include "parvl/train/data.h"

namespace parvl {

inline constexpr int kImStart = 256, kImEnd = 257, kImagePad = 258, kVisionStart = 259, kVisionEnd = 260;

// The characters that byte-level BPE files write bytes as.
inline std::string byte_character(int byte) {
  const auto printable = [](int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; };
  int code = byte;
  if (!printable(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) code += printable(b) ? 0 : 1;
  }
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
}

// A tokenizer of single bytes, a chat template in Qwen's manner, and a processor of 4-pixel patches.
inline void write_model_directory(const std::filesystem::path& dir, bool images) {
  std::filesystem::create_directories(dir);
  Json vocab = Json::object();
  for (int b = 0; b < 256; ++b) vocab[byte_character(b)] = b;
  Json added = Json::array();
  const char* specials[] = {"<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"};
  for (int i = 0; i < 5; ++i) {
    added.push_back({{"id", 256 + i},
                     {"content", specials[i]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const Json model = {{"type", "BPE"},
                      {"dropout", nullptr},
                      {"unk_token", nullptr},
                      {"continuing_subword_prefix", nullptr},
                      {"end_of_word_suffix", nullptr},
                      {"fuse_unk", false},
                      {"byte_fallback", false},
                      {"vocab", vocab},
                      {"merges", Json::array()}};
  const Json tokenizer = {{"version", "1.0"},          {"truncation", nullptr}, {"padding", nullptr},
                          {"added_tokens", added},     {"normalizer", nullptr}, {"pre_tokenizer", byte_level},
                          {"post_processor", nullptr}, {"decoder", byte_level}, {"model", model}};
  std::ofstream(dir / "tokenizer.json") << tokenizer.dump();
  const std::string chat_template =
      "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
      "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
      "{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
  std::ofstream(dir / "tokenizer_config.json") << Json{
      {"tokenizer_class", "Qwen2Tokenizer"},
      {"chat_template", chat_template},
      {"eos_token", "<|im_end|>"}}.dump();
  if (images) {
    std::ofstream(dir / "config.json") << Json{
        {"model_type", "qwen2_vl"},
        {"image_token_id", kImagePad},
        {"vision_start_token_id", kVisionStart},
        {"vision_end_token_id", kVisionEnd}}.dump();
    std::ofstream(dir / "preprocessor_config.json") << Json{
        {"image_processor_type", "Qwen2VLImageProcessor"},
        {"patch_size", 4},
        {"temporal_patch_size", 2},
        {"merge_size", 2},
        {"min_pixels", 64},
        {"max_pixels", 65536},
        {"do_resize", true},
        {"do_rescale", true},
        {"do_normalize", true},
        {"image_mean", {0.5, 0.5, 0.5}},
        {"image_std", {0.5, 0.5, 0.5}},
        {"resample", 3}}.dump();
  } else {
    std::ofstream(dir / "config.json") << Json{{"model_type", "qwen2"}}.dump();
  }
}

// A picture in which no two symmetries look alike.
inline Image test_image(int width, int height, int shade) {
  Image image{width, height, std::vector<uint8_t>(static_cast<size_t>(3 * width * height))};
  for (int i = 0; i < width * height; ++i) {
    image.rgb[static_cast<size_t>(3 * i)] = static_cast<uint8_t>(i * 7 + shade);
    image.rgb[static_cast<size_t>(3 * i + 1)] = static_cast<uint8_t>(i / width * 13);
    image.rgb[static_cast<size_t>(3 * i + 2)] = static_cast<uint8_t>(shade);
  }
  return image;
}

class LoaderTest : public ::testing::Test {
 protected:
  static constexpr int kSamples = 10;
  void SetUp() override {
    folder_ =
        std::filesystem::temp_directory_path() / ("parvl_loader_" + std::to_string(::getpid()) + "_" +
                                                  ::testing::UnitTest::GetInstance()->current_test_info()->name());
    write_model_directory(folder_ / "model", true);
    write_model_directory(folder_ / "text", false);
    std::ofstream data(folder_ / "d.jsonl");
    for (int i = 0; i < kSamples; ++i) {
      const std::string name = std::to_string(i) + ".png";
      std::ofstream(folder_ / name, std::ios::binary) << encode_png(test_image(16 + 8 * (i % 2), 16, 20 * i));
      const Json user = {{"role", "user"},
                         {"content", {{{"type", "image"}, {"image", name}}, {{"type", "text"}, {"text", "q" + name}}}}};
      const Json assistant = {{"role", "assistant"}, {"content", std::to_string(i)}};
      data << Json{{"messages", {user, assistant}}}.dump() << "\n";
    }
    data.close();
    prompts_ = *PromptBuilder::load((folder_ / "model").string());
    dataset_ = *Dataset::load("d.jsonl", folder_.string());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  LoaderOptions options(int threads) const {
    LoaderOptions o;
    o.prepare = {.augment = "dihedral", .seed = 3, .max_length = 1000};
    o.global_batch = 4;
    o.shuffle_seed = 11;
    o.last_step = 12;  // 48 samples: almost five epochs
    o.threads = threads;
    return o;
  }
  std::filesystem::path folder_;
  std::shared_ptr<const PromptBuilder> prompts_;
  std::shared_ptr<const Dataset> dataset_;
};

inline bool same(const Prompt& a, const Prompt& b) {
  if (a.ids != b.ids || a.is_target != b.is_target || a.images.size() != b.images.size()) return false;
  for (size_t i = 0; i < a.images.size(); ++i) {
    if (a.images[i]->patches != b.images[i]->patches) return false;
  }
  return true;
}

}  // namespace parvl
