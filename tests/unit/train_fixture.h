// A tiny Qwen2-VL-shaped recipe with real PNG files in a folder of its own, for the tests of training.
#pragma once

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/media/image.h"
#include "parvl/train/trainer.h"

namespace parvl {

class TrainFixture : public ::testing::Test {
 protected:
  static constexpr int kSamples = 12;

  void SetUp() override {
    const char* test = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    folder_ = std::filesystem::temp_directory_path() / absl::StrCat("parvl_train_", ::getpid(), "_", test);
    std::filesystem::create_directories(folder_);
    write_config();
    std::ofstream data(folder_ / "data.jsonl");
    for (int i = 0; i < kSamples; ++i) data << line(i).dump() << "\n";
    data.close();
    recipe_.config = (folder_ / "config.json").string();
    recipe_.tokenizer = std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/start";
    recipe_.seed = 5;
    recipe_.data.train = (folder_ / "data.jsonl").string();
    recipe_.data.micro_batch = 2;
    recipe_.data.global_batch = 4;
    recipe_.train.steps = 6;
    recipe_.train.log_every = 1;
    recipe_.train.device = "cpu";
    recipe_.train.dtype = "float64";
    recipe_.train.out = (folder_ / "out").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void write_config();
  // Most have one image and one answer; some are text only, have two turns, or no assistant turn.
  Json line(int i);

  TrainerEnvironment environment() {
    TrainerEnvironment out;
    out.clock = &clock_;
    out.base_dir = folder_.string();
    out.write = [this](std::string_view text) { text_ += text; };
    out.record = [this](const Json& event) { events_.push_back(event); };
    out.stop_requested = [this] { return stop_after_ > 0 && static_cast<int>(losses().size()) >= stop_after_; };
    return out;
  }
  std::unique_ptr<Trainer> make() {
    auto trainer = Trainer::create(recipe_, environment());
    EXPECT_TRUE(trainer.ok()) << trainer.status();
    return trainer.ok() ? *std::move(trainer) : nullptr;
  }
  absl::Status run() {
    events_.clear();
    text_.clear();
    PARVL_ASSIGN_OR_RETURN(auto trainer, Trainer::create(recipe_, environment()));
    return trainer->run();
  }
  std::vector<double> losses() const {
    std::vector<double> out;
    for (const Json& event : events_) {
      if (event["event"] == "step") out.push_back(event["loss"].get<double>());
    }
    return out;
  }

  // The samples of these lines, as the loader would hand them over.
  GlobalBatch batch(const std::vector<int>& lines) {
    GlobalBatch out;
    const auto data = *Dataset::load(recipe_.data.train, folder_.string());
    const auto prompts = *PromptBuilder::load(recipe_.tokenizer);
    for (int i : lines) {
      auto prompt = prepare_sample(data->sample(i), *prompts, {.max_length = 1000}, i);
      EXPECT_TRUE(prompt.ok()) << prompt.status();
      out.samples.push_back(*std::move(prompt));
    }
    return out;
  }

  // Copies, by name.
  static std::map<std::string, at::Tensor> gradients(const Trainer& trainer) {
    std::map<std::string, at::Tensor> out;
    for (const Param* param : trainer.model().params().owned()) {
      if (param->trainable()) out[param->name] = param->main_grad.clone();
    }
    return out;
  }
  // Everything that a step may change, copied.
  static std::vector<at::Tensor> state(const Trainer& trainer);
  static bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);  // to the bit

  std::filesystem::path folder_;
  RealClock clock_;
  Recipe recipe_;
  std::string text_;
  std::vector<Json> events_;
  int stop_after_ = 0;  // steps of one run; 0: never
};

}  // namespace parvl
