// Whole runs in one process: resuming, stopping, what may change between the parts of a run.
#include <algorithm>
#include <new>
#include <set>
#include <stdexcept>

#include "parvl/models/checkpoint.h"
#include "parvl/train/data_image_cache.h"
#include "parvl/train/score.h"
#include "parvl/train/trainer.h"
#include "train_fixture.h"

namespace parvl {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class TrainerTest : public TrainFixture {
 protected:
  void SetUp() override {
    TrainFixture::SetUp();
    recipe_.train.dtype = "float32";
  }
  std::string weights(int step) {
    return *sha256_file((folder_ / "out" / absl::StrCat("step-", step) / "model.safetensors").string());
  }
  std::string moments(int step) {
    return *sha256_file((folder_ / "out" / absl::StrCat("step-", step) / "trainer/state-0-of-1.safetensors").string());
  }
  std::string refused() {
    const absl::Status status = run();
    EXPECT_EQ(exit_code(status), 2) << status;
    return std::string(status.message());
  }
};

TEST_F(TrainerTest, ResumedRunsEqualUndisturbedOnesToTheBit) {
  for (const char* dtype : {"float32", "bfloat16", "float64"}) {
    for (const char* name : {"adamw", "sgd"}) {
      SCOPED_TRACE(absl::StrCat(dtype, " ", name));
      recipe_.train.dtype = dtype;
      recipe_.optim.name = name;
      recipe_.optim.momentum = recipe_.optim.name == "sgd" ? 0.9 : 0;
      recipe_.optim.weight_decay = 0.01;
      recipe_.optim.schedule = "cosine";
      recipe_.data.augment = "dihedral";
      ASSERT_TRUE(run().ok());
      const auto whole = losses();
      ASSERT_EQ(whole.size(), 6u);
      EXPECT_GT(std::set<double>(whole.begin(), whole.end()).size(), 4u);
      const std::string end = weights(6), end_moments = moments(6);
      fs::remove_all(recipe_.train.out);

      stop_after_ = 1;
      ASSERT_TRUE(run().ok());
      auto parts = losses();
      EXPECT_THAT(text_, HasSubstr("stopped after step 1 as asked"));
      stop_after_ = 3;
      ASSERT_TRUE(run().ok());
      EXPECT_EQ(events_[0]["event"], "resumed");
      for (double loss : losses()) parts.push_back(loss);
      stop_after_ = 0;
      ASSERT_TRUE(run().ok());
      for (double loss : losses()) parts.push_back(loss);
      EXPECT_EQ(parts, whole);
      EXPECT_EQ(weights(6), end);
      EXPECT_EQ(moments(6), end_moments);
      fs::remove_all(recipe_.train.out);
    }
  }
}

TEST_F(TrainerTest, LoaderThreadsChangeNothing) {
  std::vector<std::vector<double>> all;
  std::vector<std::string> ends;
  for (int threads : {1, 2, 5}) {
    events_.clear();
    TrainerEnvironment with_threads = environment();
    with_threads.loader_threads = threads;
    auto trainer = Trainer::create(recipe_, with_threads);
    ASSERT_TRUE(trainer.ok());
    ASSERT_TRUE((*trainer)->run().ok());
    all.push_back(losses());
    ends.push_back(weights(6));
    trainer->reset();
    fs::remove_all(recipe_.train.out);
  }
  EXPECT_EQ(all[0], all[1]);
  EXPECT_EQ(all[0], all[2]);
  EXPECT_EQ(ends[0], ends[1]);
  EXPECT_EQ(ends[0], ends[2]);
}

TEST_F(TrainerTest, WhatMayChangeBetweenThePartsOfARun) {
  recipe_.train.steps = 2;
  ASSERT_TRUE(run().ok());
  recipe_.train.steps = 4;
  recipe_.optim.lr = 1e-4;
  recipe_.optim.schedule = "linear";
  recipe_.optim.groups = {{"projector.*", 1e-5, -1}};
  recipe_.data.micro_batch = 4;
  recipe_.train.recompute = "full";
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(losses().size(), 2u);
  // The folder may move with its data.
  const fs::path moved = folder_.string() + "_moved";
  fs::rename(folder_, moved);
  folder_ = moved;
  recipe_.config = (folder_ / "config.json").string();
  recipe_.data.train = (folder_ / "data.jsonl").string();
  recipe_.train.out = (folder_ / "out").string();
  recipe_.train.steps = 5;
  const absl::Status status = run();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(losses().size(), 1u);
}

TEST_F(TrainerTest, AnotherRunsCheckpointIsNotContinued) {
  recipe_.train.steps = 1;
  ASSERT_TRUE(run().ok());
  recipe_.train.steps = 2;
  const Recipe good = recipe_;
  const std::vector<std::pair<std::string, std::function<void()>>> changes = {
      {"data.global_batch was 4, is now 8", [&] { recipe_.data.global_batch = 8; }},
      {"data.shuffle_seed was 0, is now 7", [&] { recipe_.data.shuffle_seed = 7; }},
      {"data.augment was none, is now dihedral", [&] { recipe_.data.augment = "dihedral"; }},
      {"train.dtype was float32, is now float64", [&] { recipe_.train.dtype = "float64"; }},
      {"optim.name was adamw, is now sgd", [&] { recipe_.optim.name = "sgd"; }},
      {"train.freeze was", [&] { recipe_.train.freeze = {"vision_encoder.*"}; }},
      {"weights at the start was", [&] { recipe_.seed = 6; }},
      {"data.train was 12 samples",
       [&] {
         std::ofstream(folder_ / "other.jsonl") << line(0).dump() << "\n";
         recipe_.data.train = (folder_ / "other.jsonl").string();
       }},
      {"configuration", [&] {
         auto config = *read_json_file(recipe_.config);
         config["rope_theta"] = 5000.0;  // the same shapes, another function
         std::ofstream(folder_ / "theta.json") << config.dump();
         recipe_.config = (folder_ / "theta.json").string();
       }}};
  for (const auto& [expected, change] : changes) {
    recipe_ = good;
    change();
    const std::string message = refused();
    EXPECT_THAT(message, HasSubstr("step-1 belongs to another run: "));
    EXPECT_THAT(message, HasSubstr(expected));
    EXPECT_THAT(message, HasSubstr("set train.resume to never"));
  }
  recipe_ = good;
  EXPECT_TRUE(run().ok());
}

TEST_F(TrainerTest, AnOlderRunsLaterStepsAreNotTakenForThisRuns) {
  ASSERT_TRUE(run().ok());  // leaves step-6
  const std::string first = weights(6);
  recipe_.train.resume = "never";
  stop_after_ = 2;
  ASSERT_TRUE(run().ok());  // leaves step-2
  EXPECT_THAT(text_, HasSubstr("train.resume=auto continues from there"));
  EXPECT_EQ(list_checkpoints(recipe_.train.out), (std::vector<int64_t>{2, 6}));
  recipe_.train.resume = "auto";
  stop_after_ = 0;
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(losses().size(), 4u);
  EXPECT_EQ(weights(6), first);  // and it replaced the old one by the same
  EXPECT_EQ(list_checkpoints(recipe_.train.out), (std::vector<int64_t>{6, 2}));
}

TEST_F(TrainerTest, ResumeModes) {
  recipe_.train.resume = "must";
  EXPECT_THAT(refused(), HasSubstr("holds no checkpoint"));
  recipe_.train.resume = "auto";
  recipe_.train.checkpoint_every = 2;
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(list_checkpoints(recipe_.train.out), (std::vector<int64_t>{6, 4, 2}));
  const auto whole = losses();
  const std::string end = weights(6);
  recipe_.train.resume = "must";
  ASSERT_TRUE(run().ok());
  EXPECT_THAT(text_, HasSubstr("all 6 steps are done"));
  recipe_.train.steps = 5;
  EXPECT_THAT(refused(), HasSubstr("train.steps is 5, but the resumed checkpoint already has 6 steps"));
  recipe_.train.steps = 6;
  // A path, into another folder: a branch of that run.
  recipe_.train.resume = (folder_ / "out/step-4").string();
  recipe_.train.out = (folder_ / "branch").string();
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(losses(), std::vector<double>(whole.begin() + 4, whole.end()));
  EXPECT_EQ(*sha256_file((folder_ / "branch/step-6/model.safetensors").string()), end);
  // Also where no step is left to do: the last one is saved all the same.
  recipe_.train.resume = (folder_ / "out/step-6").string();
  recipe_.train.out = (folder_ / "copy").string();
  ASSERT_TRUE(run().ok());
  EXPECT_TRUE(losses().empty());
  EXPECT_EQ(list_checkpoints(recipe_.train.out), std::vector<int64_t>{6});
  EXPECT_EQ(*sha256_file((folder_ / "copy/step-6/model.safetensors").string()), end);
  recipe_.train.resume = (folder_ / "branch").string();
  EXPECT_THAT(refused(), HasSubstr("is no whole checkpoint"));
  recipe_.train.resume = (folder_ / "nowhere").string();
  EXPECT_THAT(refused(), HasSubstr("nowhere"));
}

TEST_F(TrainerTest, AStopBeforeTheFirstStepSavesNothing) {
  TrainerEnvironment stopped = environment();
  stopped.stop_requested = [] { return true; };
  auto trainer = Trainer::create(recipe_, stopped);
  ASSERT_TRUE(trainer.ok());
  ASSERT_TRUE((*trainer)->run().ok());
  EXPECT_TRUE(list_checkpoints(recipe_.train.out).empty());
  EXPECT_THAT(text_, HasSubstr("stopped after step 0"));
}

TEST_F(TrainerTest, ABadSampleKeepsTheStepsBeforeIt) {
  std::ofstream(folder_ / "5.png") << "not a picture";
  recipe_.data.global_batch = 2;
  recipe_.data.micro_batch = 2;
  recipe_.data.shuffle_seed = 2;
  recipe_.train.steps = 6;  // one epoch
  const std::string message = refused();
  EXPECT_THAT(message, HasSubstr("data.jsonl:6"));
  EXPECT_THAT(message, HasSubstr("5.png"));
  const size_t done = losses().size();
  ASSERT_LT(done, 6u);
  ASSERT_GT(done, 0u) << "choose another shuffle_seed";
  EXPECT_EQ(list_checkpoints(recipe_.train.out), std::vector<int64_t>{static_cast<int64_t>(done)});
}

TEST_F(TrainerTest, APictureThatGoesAwayKeepsTheStepsBeforeIt) {
  recipe_.data.global_batch = 2;
  recipe_.data.shuffle_seed = 2;
  auto trainer = make();
  ASSERT_TRUE(trainer);
  fs::remove(folder_ / "5.png");  // it was there when the data were read
  const absl::Status status = trainer->run();
  EXPECT_THAT(std::string(status.message()), HasSubstr("5.png"));
  const size_t done = losses().size();
  ASSERT_LT(done, 6u);
  ASSERT_GT(done, 0u) << "choose another shuffle_seed";
  EXPECT_EQ(list_checkpoints(recipe_.train.out), std::vector<int64_t>{static_cast<int64_t>(done)});
}

// An exception stands for what a library may throw in a step, such as out of memory.
TEST_F(TrainerTest, AnExceptionInAStepKeepsTheStepsBeforeIt) {
  recipe_.train.checkpoint_every = 2;
  TrainerEnvironment throwing = environment();
  throwing.record = [this](const Json& event) {
    events_.push_back(event);
    if (losses().size() == 3 && event["event"] == "step") throw std::bad_alloc();
  };
  auto trainer = Trainer::create(recipe_, throwing);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  const absl::Status status = (*trainer)->run();
  EXPECT_EQ(exit_code(status), 1);
  EXPECT_EQ(status.message(), "step 3 failed: out of memory");
  EXPECT_EQ(list_checkpoints(recipe_.train.out), (std::vector<int64_t>{3, 2}));
  const std::string third = weights(3), third_moments = moments(3);
  trainer->reset();
  ASSERT_TRUE(run().ok());  // goes on from there
  EXPECT_EQ(losses().size(), 3u);
  recipe_.train.resume = "never";
  stop_after_ = 3;
  ASSERT_TRUE(run().ok());
  EXPECT_EQ(weights(3), third);
  EXPECT_EQ(moments(3), third_moments);
}

TEST_F(TrainerTest, AFailureToSaveDoesNotHideTheFirstOne) {
  TrainerEnvironment throwing = environment();
  throwing.record = [this](const Json& event) {
    events_.push_back(event);
    if (losses().size() == 2) {
      fs::remove_all(recipe_.train.out);
      std::ofstream(recipe_.train.out) << "a file where the folder was";
      throw std::runtime_error("the first cause\nand a backtrace");
    }
  };
  auto trainer = Trainer::create(recipe_, throwing);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  const absl::Status status = (*trainer)->run();
  EXPECT_EQ(exit_code(status), 1);
  EXPECT_THAT(std::string(status.message()), ::testing::StartsWith("step 2 failed: the first cause; after that, "));
  EXPECT_THAT(std::string(status.message()), HasSubstr("the checkpoint of step 2 was not saved"));
}

TEST_F(TrainerTest, NumbersThatAreNotFiniteAreNotGoneOnFrom) {
  recipe_.optim.lr = 1e30;
  recipe_.train.steps = 20;
  const absl::Status status = run();
  EXPECT_EQ(exit_code(status), 1);
  EXPECT_THAT(std::string(status.message()), HasSubstr("not finite"));
  EXPECT_GT(losses().size(), 0u);
  EXPECT_TRUE(list_checkpoints(recipe_.train.out).empty());
}

TEST_F(TrainerTest, TwoRunsDoNotShareAFolder) {
  auto first = make();
  const std::string message = refused();
  EXPECT_THAT(message, HasSubstr("another process trains into"));
  first.reset();
  EXPECT_TRUE(run().ok());
}

TEST_F(TrainerTest, ABadEvaluationSampleIsRefusedBeforeTheFirstStep) {
  std::ofstream eval(folder_ / "eval.jsonl");
  for (int i = 0; i < 3; ++i) eval << line(i).dump() << "\n";
  eval << R"({"messages": [{"role": "user", "content": [{"type": "image", "image": "bad.png"}]}]})"
       << "\n";
  eval.close();
  std::ofstream(folder_ / "bad.png") << "not a picture";
  recipe_.data.eval = (folder_ / "eval.jsonl").string();
  const std::string broken = refused();
  EXPECT_THAT(broken, HasSubstr("data.eval: "));
  EXPECT_THAT(broken, HasSubstr("eval.jsonl:4"));
  EXPECT_THAT(broken, HasSubstr("bad.png"));
  EXPECT_TRUE(events_.empty());
  Json longer = line(3);
  std::string text;
  for (int i = 0; i < 2000; ++i) absl::StrAppend(&text, i, " ");
  longer["messages"][0]["content"] = text;
  std::ofstream(folder_ / "eval.jsonl") << line(0).dump() << "\n" << longer.dump() << "\n";
  EXPECT_THAT(refused(), HasSubstr("over the maximum length of 1024"));
  EXPECT_TRUE(events_.empty());
}

TEST_F(TrainerTest, ALengthThatTheModelCannotTakeIsRefused) {
  recipe_.train.steps = 1;
  recipe_.data.max_length = 1025;
  const std::string message = refused();
  EXPECT_THAT(message, HasSubstr("data.max_length is 1025"));
  EXPECT_THAT(message, HasSubstr("max_position_embeddings of 1024"));
  recipe_.data.max_length = 1024;
  EXPECT_TRUE(run().ok());
}

TEST_F(TrainerTest, ScoringReadsASharedImageOnce) {
  std::ofstream shared(folder_ / "shared.jsonl");
  for (int i = 0; i < 4; ++i) shared << line(0).dump() << "\n";
  shared.close();
  auto trainer = make();
  ASSERT_TRUE(trainer);
  const auto data = *Dataset::load("shared.jsonl", folder_.string());
  const auto prompts = *PromptBuilder::load(recipe_.tokenizer);
  ImageCache images(size_t{1} << 20);
  ScoreOptions options{.batch = 3, .max_length = 1000};
  const auto without = score_dataset(trainer->model(), *prompts, *data, at::kCPU, options);
  options.images = &images;
  const auto with = score_dataset(trainer->model(), *prompts, *data, at::kCPU, options);
  ASSERT_TRUE(without.ok() && with.ok()) << without.status() << with.status();
  EXPECT_EQ(with->loss, without->loss);
  EXPECT_EQ(images.hits(), 3u);
}

TEST_F(TrainerTest, ScoreCountsSamplesWithAnswersOnly) {
  auto trainer = make();
  const auto data = *Dataset::load(recipe_.data.train, folder_.string());
  const auto prompts = *PromptBuilder::load(recipe_.tokenizer);
  ScoreOptions options{.batch = 5, .max_length = 1000};
  const auto score = score_dataset(trainer->model(), *prompts, *data, at::kCPU, options);
  ASSERT_TRUE(score.ok()) << score.status();
  EXPECT_EQ(score->samples, 10);  // lines 4 and 9 have no assistant turn
  EXPECT_LT(score->accuracy, 0.5);
  const auto step = trainer->train_step(batch({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_NEAR(score->loss, step->loss, 1e-5);
  options.stop_requested = [] { return true; };
  EXPECT_EQ(score_dataset(trainer->model(), *prompts, *data, at::kCPU, options).status().code(),
            absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace parvl
