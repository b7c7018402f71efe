// Which recorded graph of the vision encoder a batch of images takes.
#include <gmock/gmock.h>

#include <algorithm>

#include "parvl/exec/encoder_graphs.h"

namespace parvl {
namespace {

TEST(EncoderBucketsTest, AreSortedMultiplesUpToTheMost) {
  for (const int64_t merged : {1, 4, 9, 16, 25, 49}) {
    for (int64_t most = 1; most < 5000; most += 7) {
      SCOPED_TRACE(testing::Message() << most << " patches at most, " << merged << " a token");
      const std::vector<int64_t> buckets = encoder_buckets(most, merged);
      ASSERT_EQ(buckets.empty(), most < merged);
      if (buckets.empty()) continue;
      ASSERT_EQ(std::adjacent_find(buckets.begin(), buckets.end(), std::greater_equal<>()), buckets.end());
      for (const int64_t size : buckets) ASSERT_EQ(size % merged, 0);
      ASSERT_EQ(buckets.back(), most / merged * merged);
    }
  }
  EXPECT_THAT(encoder_buckets(1000, 4), testing::ElementsAre(256, 384, 512, 768, 1000));
}

TEST(EncoderBucketsTest, ABatchTakesTheFirstWithRoom) {
  const std::vector<int64_t> buckets = {256, 384, 512, 768, 1024};
  const auto any = [](int64_t) { return true; };
  EXPECT_EQ(pick_encoder_bucket(buckets, 16, any), 0u);
  EXPECT_EQ(pick_encoder_bucket(buckets, 257, any), 1u);
  EXPECT_EQ(pick_encoder_bucket(buckets, 1024, any), 4u);
  EXPECT_EQ(pick_encoder_bucket(buckets, 1025, any), std::nullopt);
  const auto from = [](int64_t least) { return [least](int64_t size) { return size >= least; }; };
  EXPECT_EQ(pick_encoder_bucket(buckets, 300, from(768)), 3u);
  EXPECT_EQ(pick_encoder_bucket(buckets, 300, from(2000)), std::nullopt);
}

// Many small frames want a graph with room for their borders, which may be far larger than their patches.
TEST(EncoderBucketsTest, NoneThatIsFarLargerThanNeeded) {
  const std::vector<int64_t> buckets = {256, 384, 512, 768, 1024};
  const auto from = [](int64_t least) { return [least](int64_t size) { return size >= least; }; };
  EXPECT_EQ(pick_encoder_bucket(buckets, 100, from(512)), 2u);
  EXPECT_EQ(pick_encoder_bucket(buckets, 100, from(513)), std::nullopt);
}

}  // namespace
}  // namespace parvl
