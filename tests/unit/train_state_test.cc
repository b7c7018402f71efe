// The optimizer's state on disk: which values lie where, written by the ranks that keep them, read in any other layout.
#include <absl/strings/match.h>

#include <random>

#include "comm_counting.h"
#include "parvl/comm/local/local_group.h"
#include "parvl/train/state_shards.h"
#include "train_fixture.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// The places of a slice's values in its tensor, one by one.
std::vector<int64_t> places(const TensorSlice& slice) {
  std::vector<int64_t> out;
  for (int64_t i = slice.begin; i < slice.end; ++i) {
    out.push_back(i / slice.length * slice.period + slice.offset + i % slice.length);
  }
  return out;
}

TEST(TensorSlice, CommonRunsAreTheValuesThatBothHold) {
  std::mt19937_64 random(11);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
  const auto any_slice = [&](int64_t numel) {
    const std::vector<int64_t> periods = {1, 2, 3, 4, 6, 8, 12, 24};
    TensorSlice out;
    out.period = below(4) == 0 ? numel : periods[static_cast<size_t>(below(8))];
    out.offset = below(out.period);
    out.length = 1 + below(out.period - out.offset);
    const int64_t all = numel / out.period * out.length;
    out.begin = below(all);
    out.end = out.begin + 1 + below(all - out.begin);
    return out;
  };
  int64_t common = 0;
  for (int round = 0; round < 20000; ++round) {
    const TensorSlice a = any_slice(48), b = any_slice(48);
    const std::vector<int64_t> in_a = places(a), in_b = places(b);
    std::map<int64_t, int64_t> got, want;  // place in a → place in b
    for (size_t i = 0; i < in_a.size(); ++i) {
      const auto found = std::find(in_b.begin(), in_b.end(), in_a[i]);
      if (found != in_b.end()) want[static_cast<int64_t>(i)] = found - in_b.begin();
    }
    const int64_t total = for_common_runs(a, b, [&](int64_t at_a, int64_t at_b, int64_t count) {
      ASSERT_GT(count, 0);
      for (int64_t i = 0; i < count; ++i) got[at_a + i] = at_b + i;
    });
    ASSERT_EQ(got, want) << to_json(a) << " " << to_json(b);
    ASSERT_EQ(total, static_cast<int64_t>(want.size()));
    common += total;
    ASSERT_EQ(places(*slice_from_json(to_json(a), 48)), in_a);
  }
  EXPECT_GT(common, 10000);
}

TEST(TensorSlice, WhatIsNoSliceIsRefused) {
  for (const char* text : {"[4,0,4,0,25]", "[4,1,4,0,1]", "[0,0,1,0,1]", "[5,0,1,0,1]", "[4,0,4,3,3]", "[4,-1,2,0,1]",
                           "[4,0,4,0]", "[4,0,4,0,\"1\"]", "{}", "7", "[4,0,9223372036854775807,0,1]"}) {
    EXPECT_FALSE(slice_from_json(Json::parse(text), 24).ok()) << text;
  }
  EXPECT_TRUE(slice_from_json(Json::parse("[4,0,4,0,24]"), 24).ok());
}

struct Ranks {
  int64_t dp = 1, zero = 0, tp = 1, pp = 1;
  std::string text() const { return absl::StrCat("dp", dp, " zero", zero, " tp", tp, " pp", pp); }
};

class StateTest : public TrainFixture {
 protected:
  void SetUp() override {
    TrainFixture::SetUp();
    recipe_.data.micro_batch = 1;
    recipe_.data.global_batch = 12;
    recipe_.train.steps = 2;
    recipe_.train.dtype = "bfloat16";  // masters too
    recipe_.optim.lr = 0.01;
  }

  // A run on several ranks to train.steps, from `from` into `out`; the ranks' ends.
  std::vector<absl::Status> train(const Ranks& layout, const std::string& from, const std::string& out,
                                  const std::function<void(Trainer&, CountingCommunicator&)>& before = {}) {
    Recipe recipe = recipe_;
    recipe.parallel.llm = {.dp = layout.dp, .tp = layout.tp, .pp = layout.pp};
    recipe.parallel.zero = layout.zero;
    recipe.train.resume = from.empty() ? "auto" : (folder_ / from).string();
    recipe.train.out = (folder_ / out).string();
    const int64_t world = layout.dp * layout.tp * layout.pp;
    std::vector<absl::Status> statuses(static_cast<size_t>(world));
    run_local_world(world, {}, [&](Communicator& inner) {
      CountingCommunicator communicator(inner);
      TrainerEnvironment env = environment();
      if (inner.rank() > 0) env.write = [](std::string_view) {};
      if (inner.rank() > 0) env.record = {};
      env.stop_requested = {};
      env.loader_threads = 1;
      env.communicator = world > 1 ? &communicator : nullptr;
      absl::Status& status = statuses[static_cast<size_t>(inner.rank())];
      auto trainer = Trainer::create(recipe, env);
      status = trainer.status();
      if (!trainer.ok()) return;
      if (before) before(**trainer, communicator);
      status = (*trainer)->run();
    });
    return statuses;
  }
  void expect_trained(const Ranks& layout, const std::string& from, const std::string& out) {
    for (const absl::Status& status : train(layout, from, out)) EXPECT_TRUE(status.ok()) << layout.text() << status;
  }
  std::string content(const std::string& file) { return *read_file((folder_ / file).string()); }
};

// Without a step in between a state goes from one layout to another and then to one process: always the same bits.
TEST_F(StateTest, GoesFromAnyLayoutToAnyOther) {
  const std::vector<Ranks> layouts = {{},
                                      {.dp = 2},
                                      {.dp = 3, .zero = 1},
                                      {.tp = 2},
                                      {.pp = 2},
                                      {.dp = 2, .zero = 1, .tp = 2},
                                      {.dp = 2, .zero = 1, .pp = 2},
                                      {.dp = 2, .zero = 1, .tp = 2, .pp = 2}};
  for (const Ranks& from : layouts) {
    fs::remove_all(folder_ / "from");
    expect_trained(from, "", "from");
    fs::remove_all(folder_ / "alone");
    expect_trained({}, "from/step-2", "alone");
    const std::string want = content("alone/step-2/trainer/state-0-of-1.safetensors");
    const std::string want_values = content("alone/step-2/model.safetensors");
    EXPECT_EQ(content("from/step-2/model.safetensors"), want_values) << from.text();
    for (const Ranks& to : layouts) {
      SCOPED_TRACE(from.text() + " to " + to.text());
      fs::remove_all(folder_ / "to");
      fs::remove_all(folder_ / "back");
      expect_trained(to, "from/step-2", "to");
      expect_trained({}, "to/step-2", "back");
      ASSERT_TRUE(content("back/step-2/trainer/state-0-of-1.safetensors") == want);
      ASSERT_TRUE(content("back/step-2/model.safetensors") == want_values);
    }
  }
}

// What is cut by ZeRO is written where it lies: saving makes no call but to agree, and each value is on disk once.
TEST_F(StateTest, NobodyGathersTheState) {
  const auto saved = train({.dp = 4, .zero = 1}, "", "out", [&](Trainer& trainer, CountingCommunicator& communicator) {
    CheckpointContents contents;
    contents.model = &trainer.model();
    contents.optimizer = &trainer.optimizer();
    contents.ranks = &trainer.ranks();
    contents.copy_from = recipe_.tokenizer;
    communicator.take();
    EXPECT_TRUE(save_checkpoint((folder_ / "out").string(), DType::kBFloat16, contents).ok());
    for (const auto& [call, count] : communicator.take().of) {
      EXPECT_EQ(call.second, "all_reduce");
      EXPECT_EQ(count.bytes, 8 * count.calls);
    }
  });
  for (const absl::Status& status : saved) EXPECT_TRUE(status.ok()) << status;
  const std::string dir = (folder_ / "out/step-0").string();
  const auto manifest = read_manifest(dir);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  const auto shards = read_state_shards(dir, *manifest);
  ASSERT_TRUE(shards.ok()) << shards.status();
  ASSERT_EQ(shards->size(), 4u);
  std::map<std::string, std::vector<int>> times;
  for (const StateShard& shard : *shards) {
    int64_t values = 0;
    for (size_t i = 0; i < shard.slices.size(); ++i) {
      std::vector<int>& of = times[shard.hashes.tensors[i].first];
      of.resize(static_cast<size_t>(shard.numels[i]));
      for (const int64_t place : places(shard.slices[i])) ++of[static_cast<size_t>(place)];
      values += shard.slices[i].size();
    }
    EXPECT_GT(values, 0);
  }
  EXPECT_GT(times.size(), 20u);
  for (const auto& [name, counts] : times) {
    EXPECT_EQ(counts, std::vector<int>(counts.size(), 1)) << name;
  }
}

// Every rank checks a share of the hashes, so any tensor of any rank's file is found, and all ranks end alike.
TEST_F(StateTest, ADamagedTensorIsNamedAndThePreviousCheckpointOffered) {
  const Ranks layout = {.dp = 2, .zero = 1, .pp = 2};
  recipe_.train.checkpoint_every = 1;
  expect_trained(layout, "", "out");
  recipe_.train.steps = 3;
  const std::string dir = (folder_ / "out/step-2").string();
  const auto shards = *read_state_shards(dir, *read_manifest(dir));
  ASSERT_EQ(shards.size(), 4u);
  for (const StateShard& shard : shards) {
    const std::string path = dir + "/" + shard.file, good = *read_file(path);
    const CheckedTensorFile file = *open_tensor_file(path, shard.hashes, shard.file);
    const size_t index = file.entries.size() / 2;
    std::string bad = good;
    bad[file.entries[index].offset] ^= 4;
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bad;
    int named = 0;
    for (const absl::Status& status : train(layout, "", "out")) {
      EXPECT_EQ(exit_code(status), 2) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr((folder_ / "out/step-1").string() + " is whole: set train.resume to it"));
      const std::string tensor = absl::StrCat("tensor '", file.entries[index].name, "' in ", shard.file);
      if (absl::StrContains(status.message(), tensor)) {
        ++named;
      } else {
        EXPECT_THAT(std::string(status.message()), HasSubstr("is damaged; its own last line says what is"));
      }
    }
    EXPECT_EQ(named, 1) << shard.file;
    std::ofstream(path, std::ios::binary | std::ios::trunc) << good;
  }
  EXPECT_TRUE(check_checkpoint(dir).ok());
}

// A rank that was stopped and wakes up when the run has long started again.
TEST_F(StateTest, ALateWriterFindsNoFolder) {
  auto trainer = make();
  ASSERT_TRUE(trainer);
  const std::string out = (folder_ / "out").string();
  const std::string folder = unpublished_dir(out, 4, 17);
  fs::create_directories(folder + "/trainer");
  trainer.reset();
  trainer = make();  // the folder's new owner cleans up
  ASSERT_TRUE(trainer);
  EXPECT_NE(folder, unpublished_dir(out, 4, 18));
  const absl::Status late = write_state(folder, trainer->optimizer(), 0, 1);
  EXPECT_EQ(late.code(), absl::StatusCode::kNotFound) << late;
  EXPECT_FALSE(fs::exists(folder));
}

// All ranks know of the sample and are well: what was learned before it is kept.
TEST_F(StateTest, ABadSampleOnSeveralRanksKeepsTheStepsBeforeIt) {
  recipe_.data.global_batch = 2;
  recipe_.data.shuffle_seed = 2;
  recipe_.train.steps = 6;
  fs::resize_file(folder_ / "5.png", 40);
  int named = 0;
  for (const absl::Status& status : train({.dp = 2, .zero = 1}, "", "out")) {
    ASSERT_FALSE(status.ok());
    named += absl::StrContains(status.message(), "5.png") ? 1 : 0;
  }
  EXPECT_EQ(named, 1);
  const size_t done = losses().size();
  ASSERT_LT(done, 6u);
  ASSERT_GT(done, 0u) << "choose another shuffle_seed";
  EXPECT_EQ(list_checkpoints((folder_ / "out").string()), std::vector<int64_t>{static_cast<int64_t>(done)});
  EXPECT_TRUE(check_checkpoint(checkpoint_dir((folder_ / "out").string(), static_cast<int64_t>(done))).ok());
}

}  // namespace
}  // namespace parvl
