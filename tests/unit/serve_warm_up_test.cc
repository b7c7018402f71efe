#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "parvl/serve/warm_up.h"
#include "tests/unit/serve_fake.h"

namespace parvl {
namespace {

class Ranks : public FakeEngine {
 public:
  Ranks(std::vector<int64_t> pids, std::shared_ptr<FakeScript> script, const std::string& folder, int64_t max_model_len)
      : FakeEngine(std::move(script), folder, max_model_len), pids_(std::move(pids)) {}
  std::vector<int64_t> pids() const override { return pids_; }

 private:
  const std::vector<int64_t> pids_;
};

class WarmUp : public testing::Test {
 protected:
  WarmUp() { write_model_folder(folder_.path()); }
  // The prompt that warms up an engine of these processes.
  Prompt prompt(std::vector<int64_t> pids, int64_t max_model_len, bool encodes = true) {
    const auto script = std::make_shared<FakeScript>();
    Ranks engine(std::move(pids), script, folder_.path(), max_model_len);
    const absl::Status status = warm_up(engine, encodes);
    EXPECT_TRUE(status.ok()) << status;
    std::lock_guard lock(script->mutex);
    EXPECT_EQ(script->prompts.size(), 1u);
    return script->prompts.at(0);
  }
  TemporaryFolder folder_;
};

TEST_F(WarmUp, EachRankHasAnImageOfItsOwn) {
  for (const auto& [pids, images] :
       {std::pair(std::vector<int64_t>{}, 1), {std::vector<int64_t>{7}, 1}, {std::vector<int64_t>{7, 8, 9}, 3}}) {
    const Prompt found = prompt(pids, 1000);
    ASSERT_EQ(found.images.size(), static_cast<size_t>(images));
    ASSERT_EQ(found.media.size(), found.images.size());
    std::set<std::vector<float>> contents;
    int64_t at = 0;
    for (size_t i = 0; i < found.images.size(); ++i) {
      contents.insert({found.images[i]->patches.begin(), found.images[i]->patches.end()});
      EXPECT_EQ(found.images[i]->num_patches(), found.images[0]->num_patches());  // so that they are dealt out evenly
      EXPECT_EQ(found.media[i].image_index, static_cast<int>(i));
      EXPECT_EQ(found.media[i].begin, at);
      EXPECT_EQ(found.media[i].length, found.images[i]->num_tokens());
      at += found.media[i].length;
    }
    EXPECT_EQ(contents.size(), found.images.size());
    EXPECT_EQ(std::count(found.ids.begin(), found.ids.end(), 260), at);
    EXPECT_GT(static_cast<int64_t>(found.ids.size()), at);
  }
}

TEST_F(WarmUp, TakesWhatFitsAndOnlyWhatIsEncodedHere) {
  const int64_t tokens = prompt({}, 1000).media[0].length;
  const Prompt two = prompt({1, 2, 3}, 2 * tokens + 4);
  EXPECT_EQ(two.images.size(), 2u);
  EXPECT_LE(static_cast<int64_t>(two.ids.size()), 2 * tokens + 2);
  EXPECT_TRUE(prompt({1, 2, 3}, tokens).images.empty());
  EXPECT_TRUE(prompt({1, 2, 3}, 1000, /*encodes=*/false).images.empty());
}

}  // namespace
}  // namespace parvl
