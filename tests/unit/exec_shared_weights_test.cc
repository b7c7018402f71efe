// Engines of one machine that map the same weights: answers as with weights of their own, read from the files once.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "parvl/base/shared_block.h"
#include "parvl/exec/load.h"
#include "tests/unit/exec_given_fixture.h"
#include "tests/unit/exec_ranks_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

class SharedWeightsTest : public GivenFeaturesTest {
 protected:
  void SetUp() override {
    GivenFeaturesTest::SetUp();
    if (test_device() != "cpu") GTEST_SKIP() << "on a GPU each process has weights of its own";
  }
  LoadOptions blocks_for(int64_t ranks) {
    LoadOptions out;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      blocks_.push_back(*SharedBlock::create("parvl-test-weights"));
      out.shared_weights.push_back(blocks_.back()->path());
    }
    return out;
  }
  // What is read from it from now on is wrong.
  static void zero_weights(const std::string& dir) {
    const std::string path = dir + "/model.safetensors";
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header = 0;
    file.read(reinterpret_cast<char*>(&header), sizeof header);
    file.seekp(static_cast<std::streamoff>(sizeof header + header));
    const std::string zeros(std::filesystem::file_size(path) - sizeof header - header, '\0');
    ASSERT_TRUE(file.write(zeros.data(), static_cast<std::streamsize>(zeros.size())).flush());
  }

  std::vector<std::unique_ptr<SharedBlock>> blocks_;
};
class SharedWeightsFamilyTest : public SharedWeightsTest, public testing::WithParamInterface<std::string> {};

TEST_P(SharedWeightsFamilyTest, ASecondEngineReadsNoFileAndAnswersTheSame) {
  const std::string dir = make_dir(GetParam());
  const std::vector<Case> cases = make_cases(dir);
  EngineOptions options;
  options.load = blocks_for(1);
  auto first = load(dir, options);
  zero_weights(dir);
  const auto second = load(dir, options);
  run_all(*first, cases, 1);
  first.reset();  // what it loaded stays
  run_all(*second, cases, 1);
}

TEST_P(SharedWeightsFamilyTest, EachRankOfACutModelSharesItsPart) {
  const std::string dir = make_dir(GetParam());
  const std::vector<Case> cases = make_cases(dir);
  EngineOptions options;
  options.load = blocks_for(2);
  const auto first = load(dir, over_ranks(options, 2));
  run_all(*first, cases, 1);  // until then the other rank may still be reading
  zero_weights(dir);
  const auto second = load(dir, over_ranks(options, 2));
  run_all(*second, cases, 1);
  const int64_t parts[] = {shared_bytes({options.load.shared_weights[0]}),
                           shared_bytes({options.load.shared_weights[1]})};
  EXPECT_NE(parts[0], 0);
  EXPECT_NE(parts[1], 0);
  // The first rank, which plans for both, counts both as there; of free memory it may use as good as none here.
  options.load.device = "cpu";
  options.load.memory_utilization = 1e-12;
  const auto files = *read_files(dir, options.load);
  EXPECT_NEAR(static_cast<double>(memory_there(files, options.load).bytes), static_cast<double>(parts[0] + parts[1]),
              16);
}

TEST_P(SharedWeightsFamilyTest, AnotherPartOrTypeIsNotTakenForIt) {
  const std::string dir = make_dir(GetParam());
  EngineOptions options;
  options.load = blocks_for(1);
  options.load.device = "cpu";
  const auto first = load(dir, options);
  options.load.dtype = "bfloat16";
  EXPECT_THAT(load_engine(dir, options, clock()).status().message(), HasSubstr("shared memory holds"));
}

TEST_F(SharedWeightsTest, EncodersShareTheirs) {
  const std::string dir = make_dir("qwen2_5_vl");
  EngineOptions options;
  options.load = blocks_for(1);
  const auto first = load_encoder(dir, options);
  const auto prompts = load_front(dir, {})->prompts;
  const auto picture = image(*prompts, 40, 24, 1);
  const auto want = encode(*first, picture);
  zero_weights(dir);
  const auto second = load_encoder(dir, options);
  EXPECT_EQ(encode(*second, picture)->held.text(), want->held.text());
}

INSTANTIATE_TEST_SUITE_P(Families, SharedWeightsFamilyTest, testing::Values("llama", "qwen2", "qwen2_vl", "qwen2_5_vl"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace parvl
