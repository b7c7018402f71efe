// SampleOrder, prepare_sample and BatchLoader on a small model directory and real PNG files.
#include <algorithm>
#include <numeric>
#include <set>

#include "parvl/train/data_image_cache.h"
#include "train_loader_fixture.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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
