// The engine's loop with an executor that pretends: many threads submit and cancel, encodings and steps fail, and every
// request still ends exactly once.
#include <gtest/gtest.h>

#include <deque>
#include <future>
#include <set>
#include <thread>

#include "parvl/base/rng.h"
#include "parvl/exec/engine_loop.h"
#include "tests/unit/serve_fake.h"

namespace parvl {
namespace {

constexpr double kStepSeconds = 1e-3;

// Answers on its own thread: random bytes as tokens, now and then a failure.
class PretendingExecutor : public ModelExecutor {
 public:
  PretendingExecutor(uint64_t seed, int64_t failures_in_1000)
      : rng_(seed), failures_(failures_in_1000), thread_([this] { loop(); }) {}
  ~PretendingExecutor() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    arrived_.notify_one();
    thread_.join();
  }

  absl::Status begin(RequestId id, const EngineRequest&) override {
    EXPECT_TRUE(known_.insert(id.value).second);
    return absl::OkStatus();
  }
  void end(RequestId id) override { EXPECT_EQ(known_.erase(id.value), 1u); }
  void set_notify(std::function<void()> notify) override { notify_ = std::move(notify); }
  void submit(const SchedulerOutput& output) override {
    for (const SequenceWork& work : output.sequences) EXPECT_TRUE(known_.contains(work.id.value));
    std::lock_guard lock(mutex_);
    jobs_.push_back(output);
    arrived_.notify_one();
  }
  std::optional<Completion> poll() override {
    std::lock_guard lock(mutex_);
    if (done_.empty()) return std::nullopt;
    Completion out = std::move(done_.front());
    done_.pop_front();
    return out;
  }

 private:
  bool fails() { return static_cast<int64_t>(rng_.below(1000)) < failures_; }

  void loop() {
    for (;;) {
      SchedulerOutput job;
      {
        std::unique_lock lock(mutex_);
        arrived_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      for (const EncodeWork& work : job.encodes) {
        Completion done;
        done.kind = Completion::Kind::kEncode;
        done.slot = work.slot;
        done.start_s = done.end_s = clock_.now_seconds();
        if (fails()) done.status = failed("the encoder pretends to fail");
        report(std::move(done));
      }
      if (!job.sequences.empty()) report(step(job));
    }
  }

  Completion step(const SchedulerOutput& job) {
    Completion done;
    done.step = job.step;
    done.start_s = clock_.now_seconds();
    done.end_s = done.start_s + kStepSeconds;
    if (fails()) {
      done.status = failed("the step pretends to fail");
      return done;
    }
    for (const SequenceWork& work : job.sequences) {
      if (!work.samples) continue;
      SampledToken token;
      token.id = static_cast<TokenId>('a' + rng_.below(26));
      if (fails()) token.status = failed("the logits pretend to be broken");
      done.tokens.push_back(std::move(token));
    }
    return done;
  }

  void report(Completion done) {
    {
      std::lock_guard lock(mutex_);
      done_.push_back(std::move(done));
    }
    notify_();
  }

  const RealClock clock_;
  std::set<int64_t> known_;  // the engine's thread only
  Rng rng_;
  int64_t failures_;
  std::function<void()> notify_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<SchedulerOutput> jobs_;
  std::deque<Completion> done_;
  bool stopping_ = false;
  std::thread thread_;
};

class EngineLoopTest : public testing::Test {
 protected:
  EngineLoopTest() { write_model_folder(folder_.path()); }

  std::unique_ptr<EngineLoop> make(uint64_t seed, int64_t failures_in_1000,
                                   std::function<void(const EngineStep&)> on_step = nullptr) {
    EngineConfig config;
    config.hooks.on_step = std::move(on_step);
    config.scheduler.max_model_len = 64;
    config.scheduler.num_blocks = 20;
    config.scheduler.block_size = 4;
    config.scheduler.max_seqs = 8;
    config.scheduler.max_batched_tokens = 32;
    config.scheduler.encoder_cache_bytes = 4000;
    config.prompts = *PromptBuilder::load(folder_.path());
    config.end_tokens = {257};
    config.encoder_bytes_a_token = 100;
    return std::make_unique<EngineLoop>(std::move(config), std::make_unique<PretendingExecutor>(seed, failures_in_1000),
                                        clock_);
  }

  // A text of random length, sometimes with one of a few images.
  static std::shared_ptr<const Prompt> random_prompt(Rng& rng) {
    auto prompt = std::make_shared<Prompt>();
    for (uint64_t n = 1 + rng.below(20); n > 0; --n) prompt->ids.push_back(static_cast<TokenId>('a' + rng.below(3)));
    if (rng.below(2) == 0) return prompt;
    auto image = std::make_shared<ProcessedImage>();
    image->grid_t = 1;
    image->grid_h = 2;
    image->grid_w = 2 * static_cast<int>(1 + rng.below(8));
    image->merge_size = 2;
    image->patch_floats = 1;
    image->patches.assign(static_cast<size_t>(image->num_patches()), static_cast<float>(rng.below(4)));
    prompt->media.push_back({0, static_cast<int64_t>(prompt->ids.size()), image->num_tokens()});
    prompt->ids.insert(prompt->ids.end(), static_cast<size_t>(image->num_tokens()), 260);
    prompt->images.push_back(std::move(image));
    return prompt;
  }

  struct Ends {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<int> count;  // by request
    int64_t total = 0, failed = 0, cancelled = 0;
  };

  static RequestId submit(Engine& engine, Rng& rng, size_t index, Ends& ends) {
    EngineRequest request;
    request.prompt = random_prompt(rng);
    request.sampling.max_tokens = static_cast<int64_t>(1 + rng.below(30));
    request.priority = static_cast<int>(rng.below(3));
    auto tokens = std::make_shared<int64_t>(0);
    request.on_token = [tokens](const TokenEvent&) { ++*tokens; };
    request.on_end = [&ends, index, tokens, wanted = request.sampling.max_tokens](const auto& result) {
      if (result.ok()) {
        EXPECT_EQ(static_cast<int64_t>(result->token_ids.size()), *tokens);
        if (result->finish == FinishReason::kLength) {
          EXPECT_EQ(*tokens, wanted);
        }
      }
      std::lock_guard lock(ends.mutex);
      ++ends.count[index];
      ++ends.total;
      ends.failed += !result.ok();
      ends.cancelled += result.ok() && result->finish == FinishReason::kNone;
      ends.changed.notify_all();
    };
    return engine.submit(std::move(request));
  }

  TemporaryFolder folder_;
  RealClock clock_;
};

TEST_F(EngineLoopTest, EveryRequestEndsOnceWhateverHappens) {
  constexpr size_t kThreads = 4, kEach = 100;
  for (const int64_t failures : {0, 10}) {
    Ends ends;
    ends.count.resize(kThreads * kEach);
    const auto engine = make(7, failures);
    std::vector<std::thread> clients;
    for (size_t t = 0; t < kThreads; ++t) {
      clients.emplace_back([&, t] {
        Rng rng(100 + t);
        std::vector<RequestId> mine;
        for (size_t i = 0; i < kEach; ++i) {
          mine.push_back(submit(*engine, rng, t * kEach + i, ends));
          if (rng.below(3) == 0) engine->cancel(mine[rng.below(mine.size())]);
        }
      });
    }
    for (std::thread& client : clients) client.join();
    std::unique_lock lock(ends.mutex);
    ASSERT_TRUE(ends.changed.wait_for(lock, std::chrono::seconds(60), [&] { return ends.total == kThreads * kEach; }));
    for (const int count : ends.count) EXPECT_EQ(count, 1);
    EXPECT_GT(ends.cancelled, 0);
    EXPECT_EQ(ends.failed > 0, failures > 0);
    lock.unlock();
    // The last end comes from inside a turn; its figures come a moment later.
    while (engine->stats().running + engine->stats().waiting + engine->stats().blocks_used > 0)
      std::this_thread::yield();
  }
}

TEST_F(EngineLoopTest, StoppingInTheMiddleEndsEveryRequestOnce) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Ends ends;
    ends.count.resize(50);
    auto engine = make(seed, 5);
    Rng rng(seed);
    for (size_t i = 0; i < ends.count.size(); ++i) submit(*engine, rng, i, ends);
    engine.reset();
    for (const int count : ends.count) EXPECT_EQ(count, 1);
  }
}

TEST(BusyTime, WhatRunsAtOnceCountsOnce) {
  BusyTime busy;
  busy.add(1, 3);
  busy.add(1, 3.5);  // of the same batch
  EXPECT_DOUBLE_EQ(busy.total_s(), 2.5);
  busy.add(4, 5);
  busy.add(4.5, 4.75);
  EXPECT_DOUBLE_EQ(busy.total_s(), 3.5);
}

TEST_F(EngineLoopTest, TellsOfEachStepWhatItHeldAndHowLongItTook) {
  std::vector<EngineStep> steps;
  auto engine = make(1, 0, [&](const EngineStep& step) { steps.push_back(step); });
  EngineRequest request;
  auto prompt = std::make_shared<Prompt>();
  prompt->ids.assign(40, 'a');  // a step takes 32
  request.prompt = prompt;
  request.sampling.max_tokens = 3;
  request.on_token = [](const TokenEvent&) {};
  std::promise<void> ended;
  request.on_end = [&](const auto& result) {
    EXPECT_TRUE(result.ok());
    ended.set_value();
  };
  engine->submit(std::move(request));
  ended.get_future().wait();
  engine.reset();
  std::vector<int64_t> tokens;
  std::vector<bool> decodes;
  for (const EngineStep& step : steps) {
    EXPECT_EQ(step.sequences, 1);
    EXPECT_NEAR(step.seconds, kStepSeconds, 1e-6);
    tokens.push_back(step.tokens);
    decodes.push_back(step.is_decode());
  }
  EXPECT_EQ(tokens, (std::vector<int64_t>{32, 8, 1, 1}));
  EXPECT_EQ(decodes, (std::vector<bool>{false, false, true, true}));
}

}  // namespace
}  // namespace parvl
