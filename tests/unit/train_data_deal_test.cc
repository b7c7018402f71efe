// How samples are dealt out over replicas, and images over an encoder's own ranks.
#include <algorithm>
#include <set>

#include "train_loader_fixture.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

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
  EXPECT_GT(estimate_cost(dataset_->sample(1), *prompts_)->tokens,
            estimate_cost(dataset_->sample(0), *prompts_)->tokens + 1);
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

// Every rank knows who encodes which image, all the same; encoder ranks have all replicas' samples; and each decodes
// only what it encodes, augmented as everywhere.
TEST_F(LoaderTest, AnEncodersOwnRanksDecodeTheirImages) {
  const auto loader = [&](int64_t replica, int64_t group) {
    LoaderOptions o = options(2);
    o.share = {.micro_batch = 1, .replica = replica, .replicas = 2};
    o.balance = true;
    o.encoders = {.groups = 2, .group = group};
    o.prepare.augment = "dihedral";
    return std::make_unique<BatchLoader>(dataset_, prompts_, o);
  };
  const auto first = loader(-1, 0), second = loader(-1, 1), llm0 = loader(0, -1), llm1 = loader(1, -1);
  LoaderOptions o = options(2);
  o.share = {.micro_batch = 1, .replica = -1, .replicas = 2};
  o.balance = true;
  o.prepare.augment = "dihedral";
  BatchLoader whole(dataset_, prompts_, o);
  std::set<int64_t> groups;
  for (int64_t step = 0; step < 12; ++step) {
    const GlobalBatch a = *first->next(), b = *second->next(), all = *whole.next();
    const GlobalBatch llm[] = {*llm0->next(), *llm1->next()};
    ASSERT_EQ(a.samples.size(), 4u);
    EXPECT_EQ(a.encoders, b.encoders);
    for (size_t i = 0; i < 4; ++i) {
      const Prompt& of_llm = llm[i % 2].samples[i / 2];
      EXPECT_EQ(llm[i % 2].encoders[i / 2], a.encoders[i]);
      EXPECT_EQ(of_llm.ids, all.samples[i].ids);
      EXPECT_EQ(a.samples[i].ids, all.samples[i].ids);
      ASSERT_EQ(a.encoders[i].size(), all.samples[i].images.size());
      for (size_t image = 0; image < a.encoders[i].size(); ++image) {
        groups.insert(a.encoders[i][image]);
        const bool of_first = a.encoders[i][image] == 0;
        const ProcessedImage& want = *all.samples[i].images[image];
        EXPECT_EQ((of_first ? a : b).samples[i].images[image]->patches, want.patches);
        for (const ProcessedImage& outline : {*(of_first ? b : a).samples[i].images[image], *of_llm.images[image]}) {
          EXPECT_TRUE(outline.patches.empty());
          EXPECT_EQ(std::pair(outline.grid_h, outline.grid_w), std::pair(want.grid_h, want.grid_w));
          EXPECT_EQ(outline.num_tokens(), want.num_tokens());
        }
      }
    }
  }
  EXPECT_EQ(groups.size(), 2u);
}

}  // namespace
}  // namespace parvl
