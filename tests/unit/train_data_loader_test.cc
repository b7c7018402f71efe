// SampleOrder, prepare_sample and BatchLoader on a small model directory and real PNG files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "parvl/base/json.h"
#include "parvl/train/data.h"
#include "parvl/train/data_image_cache.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kImStart = 256, kImEnd = 257, kImagePad = 258, kVisionStart = 259, kVisionEnd = 260;

// The characters that byte-level BPE files write bytes as.
std::string byte_character(int byte) {
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
void write_model_directory(const fs::path& dir, bool images) {
  fs::create_directories(dir);
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
Image test_image(int width, int height, int shade) {
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
    folder_ = fs::temp_directory_path() / ("parvl_loader_" + std::to_string(::getpid()) + "_" +
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
  void TearDown() override { fs::remove_all(folder_); }

  LoaderOptions options(int threads) const {
    LoaderOptions o;
    o.prepare = {.augment = "dihedral", .seed = 3, .max_length = 1000};
    o.global_batch = 4;
    o.shuffle_seed = 11;
    o.last_step = 12;  // 48 samples: almost five epochs
    o.threads = threads;
    return o;
  }

  fs::path folder_;
  std::shared_ptr<const PromptBuilder> prompts_;
  std::shared_ptr<const Dataset> dataset_;
};

bool same(const Prompt& a, const Prompt& b) {
  if (a.ids != b.ids || a.is_target != b.is_target || a.images.size() != b.images.size()) return false;
  for (size_t i = 0; i < a.images.size(); ++i) {
    if (a.images[i]->patches != b.images[i]->patches) return false;
  }
  return true;
}

TEST(SampleOrder, EachEpochIsAPermutationOfItsOwn) {
  SampleOrder order(1000, 5);
  std::vector<int64_t> epochs[2];
  for (int64_t position = 0; position < 2000; ++position) epochs[position / 1000].push_back(order.at(position));
  EXPECT_NE(epochs[0], epochs[1]);
  for (std::vector<int64_t>& epoch : epochs) {
    std::vector<int64_t> sorted = epoch, all(1000);
    std::sort(sorted.begin(), sorted.end());
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(sorted, all);
    EXPECT_NE(epoch, all);
  }
  SampleOrder other_seed(1000, 6), same_seed(1000, 5);
  std::vector<int64_t> other;
  for (int64_t position = 0; position < 1000; ++position) other.push_back(other_seed.at(position));
  EXPECT_NE(other, epochs[0]);
  EXPECT_EQ(same_seed.at(1500), epochs[1][500]);  // a resumed run starts in the middle
  EXPECT_EQ(same_seed.at(3), epochs[0][3]);
  SampleOrder one(1, 9);
  EXPECT_EQ(one.at(1'000'000), 0);
}

TEST_F(LoaderTest, PreparesOneSample) {
  const auto prompt = prepare_sample(dataset_->sample(1), *prompts_, {.max_length = 1000}, 0);
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  // 24 x 16 pixels in 4-pixel patches, merged 2 x 2.
  EXPECT_EQ(std::count(prompt->ids.begin(), prompt->ids.end(), kImagePad), 3 * 2);
  std::vector<TokenId> learned;
  for (size_t i = 0; i < prompt->ids.size(); ++i) {
    if (prompt->is_target[i]) learned.push_back(prompt->ids[i]);
  }
  EXPECT_THAT(learned, ::testing::ElementsAre('1', kImEnd));
  ASSERT_EQ(prompt->images.size(), 1u);
  EXPECT_EQ(prompt->images[0]->num_tokens(), 6);
}

TEST_F(LoaderTest, AugmentationIsAFunctionOfSeedAndPosition) {
  std::set<std::vector<float>> seen;
  for (int64_t position = 0; position < 64; ++position) {
    const PrepareOptions options{.augment = "dihedral", .seed = 1, .max_length = 1000};
    const auto first = prepare_sample(dataset_->sample(0), *prompts_, options, position);
    const auto again = prepare_sample(dataset_->sample(0), *prompts_, options, position);
    ASSERT_TRUE(first.ok() && again.ok());
    EXPECT_TRUE(same(*first, *again));
    seen.insert(first->images[0]->patches);
  }
  EXPECT_EQ(seen.size(), 8u);
  const auto plain = prepare_sample(dataset_->sample(0), *prompts_, {.seed = 1, .max_length = 1000}, 5);
  const auto direct = prompts_->image_processor().process(test_image(16, 16, 0));
  ASSERT_TRUE(plain.ok() && direct.ok());
  EXPECT_EQ(plain->images[0]->patches, direct->patches);
}

TEST_F(LoaderTest, RefusalsNameTheSample) {
  const auto plain = prepare_sample(dataset_->sample(0), *prompts_, {.max_length = 1000}, 0);
  ASSERT_TRUE(plain.ok());
  const auto tokens = static_cast<int64_t>(plain->ids.size());
  EXPECT_TRUE(prepare_sample(dataset_->sample(0), *prompts_, {.max_length = tokens}, 0).ok());
  const auto message = [](const absl::StatusOr<Prompt>& prompt) {
    EXPECT_EQ(exit_code(prompt.status()), 2) << prompt.status();
    return std::string(prompt.status().message());
  };
  const std::string name = (folder_ / "d.jsonl").string() + ":1: ";
  const std::string longer = message(prepare_sample(dataset_->sample(0), *prompts_, {.max_length = tokens - 1}, 0));
  EXPECT_THAT(longer, StartsWith(name + "has " + std::to_string(tokens) + " tokens, over the maximum length of "));

  std::ofstream(folder_ / "0.png", std::ios::binary) << encode_png(test_image(16, 16, 0)).substr(0, 60);
  const std::string broken = message(prepare_sample(dataset_->sample(0), *prompts_, {.max_length = 1000}, 0));
  EXPECT_THAT(broken, StartsWith(name));
  EXPECT_THAT(broken, HasSubstr("0.png"));
  fs::remove(folder_ / "0.png");
  EXPECT_THAT(message(prepare_sample(dataset_->sample(0), *prompts_, {.max_length = 1000}, 0)), HasSubstr("0.png"));

  const auto text_only = PromptBuilder::load((folder_ / "text").string());
  ASSERT_TRUE(text_only.ok()) << text_only.status();
  EXPECT_THAT(message(prepare_sample(dataset_->sample(1), **text_only, {.max_length = 1000}, 0)),
              HasSubstr("holds an image, but this model takes no images"));
}

TEST_F(LoaderTest, TheSameBatchesWhateverTheThreads) {
  std::vector<GlobalBatch> expected;
  for (const int threads : {1, 2, 5}) {
    BatchLoader loader(dataset_, prompts_, options(threads));
    for (int64_t step = 0; step < 12; ++step) {
      auto batch = loader.next();
      ASSERT_TRUE(batch.ok()) << batch.status();
      EXPECT_EQ(batch->step, step);
      ASSERT_EQ(batch->samples.size(), 4u);
      if (threads == 1) {
        expected.push_back(*std::move(batch));
        continue;
      }
      for (size_t i = 0; i < 4; ++i)
        EXPECT_TRUE(same(batch->samples[i], expected[static_cast<size_t>(step)].samples[i]));
    }
    EXPECT_EQ(loader.next().status().code(), absl::StatusCode::kOutOfRange);
  }
  // The loader's batches are what prepare_sample gives in the order's order.
  SampleOrder order(kSamples, 11);
  for (int64_t position = 0; position < 48; ++position) {
    const auto prompt = prepare_sample(dataset_->sample(order.at(position)), *prompts_, options(1).prepare, position);
    ASSERT_TRUE(prompt.ok());
    EXPECT_TRUE(same(*prompt, expected[static_cast<size_t>(position / 4)].samples[static_cast<size_t>(position % 4)]));
  }
}

// Balanced replicas have together the samples of the plain order, augmented alike, and none more to compute than there.
TEST_F(LoaderTest, BalancedReplicasShareTheSameSamples) {
  BatchLoader plain(dataset_, prompts_, options(1));
  std::vector<std::unique_ptr<BatchLoader>> replicas;
  for (int64_t replica = 0; replica < 2; ++replica) {
    LoaderOptions o = options(2);
    o.share = {.micro_batch = 1, .replica = replica, .replicas = 2};
    o.balance = true;
    replicas.push_back(std::make_unique<BatchLoader>(dataset_, prompts_, o));
  }
  const auto cost = [](const std::vector<Prompt>& samples) {
    size_t tokens = 0;
    for (const Prompt& sample : samples) tokens += sample.ids.size();
    return tokens;
  };
  size_t plain_worst = 0, balanced_worst = 0;
  for (int64_t step = 0; step < 12; ++step) {
    GlobalBatch all = *plain.next();
    std::vector<std::vector<Prompt>> before(2), after;
    for (size_t i = 0; i < 4; ++i) before[i % 2].push_back(all.samples[i]);
    for (const auto& replica : replicas) after.push_back(replica->next()->samples);
    for (const auto& samples : after) {
      ASSERT_EQ(samples.size(), 2u);
      for (const Prompt& sample : samples) {
        const auto found = std::find_if(all.samples.begin(), all.samples.end(),
                                        [&](const Prompt& other) { return same(sample, other); });
        ASSERT_NE(found, all.samples.end()) << "a sample that is not of this step, or twice";
        all.samples.erase(found);
      }
    }
    const size_t plain_here = std::max(cost(before[0]), cost(before[1]));
    const size_t balanced_here = std::max(cost(after[0]), cost(after[1]));
    EXPECT_LE(balanced_here, plain_here);
    plain_worst += plain_here;
    balanced_worst += balanced_here;
  }
  EXPECT_LT(balanced_worst, plain_worst);
}

TEST_F(LoaderTest, CostsFollowTheImagesHeaders) {
  // 16 × 16 pixels and 24 × 16, of patches of 4 merged by 2.
  EXPECT_GT(*estimate_cost(dataset_->sample(1), *prompts_), *estimate_cost(dataset_->sample(0), *prompts_) + 1);
  // Ranks that see other costs would deal out other samples, so what cannot be read ends the step.
  fs::resize_file(folder_ / "1.png", 5);
  EXPECT_THAT(std::string(estimate_cost(dataset_->sample(1), *prompts_).status().message()), HasSubstr("1.png"));
  LoaderOptions o = options(2);
  o.balance = true;
  BatchLoader loader(dataset_, prompts_, o);
  absl::Status ended;
  for (int64_t step = 0; step < 3 && ended.ok(); ++step) ended = loader.next().status();
  EXPECT_THAT(std::string(ended.message()), HasSubstr("1.png"));
}

TEST_F(LoaderTest, AResumedRunGoesOnWithTheSameBatches) {
  BatchLoader whole(dataset_, prompts_, options(2));
  LoaderOptions later = options(2);
  later.first_step = 7;
  BatchLoader resumed(dataset_, prompts_, later);
  for (int64_t step = 0; step < 12; ++step) {
    const auto batch = whole.next();
    ASSERT_TRUE(batch.ok());
    if (step < 7) continue;
    const auto again = resumed.next();
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(again->step, step);
    for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(same(batch->samples[i], again->samples[i]));
  }
}

TEST_F(LoaderTest, PrefetchIsBounded) {
  LoaderOptions bounded = options(3);
  bounded.prefetch_steps = 2;
  BatchLoader loader(dataset_, prompts_, bounded);
  size_t most = 0;
  for (int step = 0; step < 12; ++step) {
    ASSERT_TRUE(loader.next().ok());
    // Let the threads run into the bound: the next step's batch is whole only after they had the chance to overrun.
    for (int i = 0; i < 1000; ++i) most = std::max(most, loader.steps_ahead());
  }
  EXPECT_LE(most, 2u);
  EXPECT_GE(most, 1u);
}

TEST_F(LoaderTest, AnErrorComesAtItsStepAndStays) {
  SampleOrder order(kSamples, 11);
  // The two samples at positions 6 and 7, of step 1, are broken: the one at the lower place is named, however many
  // threads.
  const std::string bad[] = {dataset_->sample(order.at(6)).name, dataset_->sample(order.at(7)).name};
  for (const int64_t position : {6, 7})
    std::ofstream(dataset_->sample(order.at(position)).image_paths[0]) << "not an image";
  for (const int threads : {1, 4}) {
    BatchLoader loader(dataset_, prompts_, options(threads));
    EXPECT_TRUE(loader.next().ok());
    const absl::Status error = loader.next().status();
    EXPECT_THAT(std::string(error.message()), StartsWith(bad[0] + ": "));
    EXPECT_EQ(exit_code(error), 2);
    EXPECT_EQ(loader.next().status(), error);
  }
}

TEST_F(LoaderTest, StopsCleanlyWhileTheThreadsAreBusy) {
  for (int i = 0; i < 20; ++i) {
    LoaderOptions long_run = options(3);
    long_run.last_step = int64_t{1} << 40;
    BatchLoader loader(dataset_, prompts_, long_run);
    if (i % 2 == 1) {
      EXPECT_TRUE(loader.next().ok());
    }
  }
}

TEST_F(LoaderTest, ImageCacheKeepsWhatFits) {
  const std::string first = (folder_ / "0.png").string(), second = (folder_ / "2.png").string();
  ImageCache cache(3 * 16 * 16 + 10);
  ASSERT_TRUE(cache.get(first).ok());
  ASSERT_TRUE(cache.get(second).ok());
  EXPECT_EQ(cache.bytes(), 3u * 16 * 16);
  EXPECT_EQ(cache.hits(), 0u);
  fs::remove(folder_ / "0.png");
  const auto kept = cache.get(first);
  ASSERT_TRUE(kept.ok());
  EXPECT_EQ(cache.hits(), 1u);
  EXPECT_EQ((*kept)->rgb, test_image(16, 16, 0).rgb);
  fs::remove(folder_ / "2.png");
  EXPECT_EQ(cache.get(second).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace parvl
