// The gateway's engine over real streams.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "parvl/serve/pools/fleet_engine.h"
#include "parvl/serve/pools/stream_client.h"
#include "parvl/serve/pools/stream_server.h"
#include "tests/unit/pools_fixture.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

struct Client {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<TokenId> tokens;
  std::string text;
  std::optional<absl::StatusOr<GenerateResult>> end;
  int ends = 0;

  bool wait(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(30), condition);
  }
  bool has(size_t count) {
    return wait([&] { return tokens.size() >= count; });
  }
  bool over() {
    return wait([&] { return end.has_value(); });
  }
};

class FleetEngineTest : public testing::Test {
 protected:
  FleetEngineTest() { write_model_folder(folder_.path()); }

  absl::Status start(int64_t instances) { return start({{.name = "llm-pool", .instances = instances}}); }

  // One encoder, and two that may take it on.
  absl::Status start_apart() {
    return start({{.name = "encoder-pool", .encodes = true, .generates = false},
                  {.name = "llm-pool", .instances = 2, .encodes = false, .generates = true}});
  }

  absl::Status start(std::vector<FleetPool> pools) {
    FleetOptions options;
    options.engines.resize(pools.size());
    options.fleet = settings_;
    options.fleet.pools = std::move(pools);
    options.fleet.instance.backoff_first_s = 0.01;
    options.fleet.instance.backoff_most_s = 0.25;
    options.model_dir = folder_.path();
    options.front.prompts = *PromptBuilder::load(folder_.path());
    options.front.end_tokens = {kEnd};
    options.front.max_model_len = 1000;
    options.token = kToken;
    auto threads = std::make_unique<Threads>(script_, folder_.path());
    threads_ = threads.get();
    auto engine = FleetEngine::start(std::move(options), std::move(threads), kClock);
    if (!engine.ok()) return engine.status();
    engine_ = *std::move(engine);
    return absl::OkStatus();
  }

  // With an image whose every value is `shows`, unless that is 0.
  std::shared_ptr<Client> submit(uint64_t seed, int64_t tokens, RequestId* id = nullptr, uint8_t shows = 0) {
    auto client = std::make_shared<Client>();
    EngineRequest request;
    auto prompt = std::make_shared<Prompt>();
    prompt->ids = {1, 2, 3};
    if (shows > 0) {
      ProcessedImage image = {.grid_t = 1, .grid_h = 2, .grid_w = 2, .patch_floats = 96, .merge_size = 2};
      image.key[0] = shows;
      image.patches.assign(size_t{4} * 96, shows);
      prompt->images.push_back(std::make_shared<const ProcessedImage>(std::move(image)));
      prompt->media.push_back({0, 1, 1});
    }
    request.prompt = prompt;
    request.sampling.seed = seed;
    request.sampling.max_tokens = tokens;
    request.on_token = [client](const TokenEvent& event) {
      std::lock_guard lock(client->mutex);
      client->tokens.push_back(event.token_id);
      client->text += event.text;
      client->changed.notify_all();
    };
    request.on_end = [client](const absl::StatusOr<GenerateResult>& result) {
      std::lock_guard lock(client->mutex);
      client->end = result;
      ++client->ends;
      client->changed.notify_all();
    };
    const RequestId given = engine_->submit(std::move(request));
    if (id != nullptr) *id = given;
    return client;
  }

  bool wait_for(const std::function<bool(const std::vector<InstanceStatus>&)>& condition) {
    const double end_s = kClock.now_seconds() + 30;
    while (!condition(engine_->instances())) {
      if (kClock.now_seconds() > end_s) return false;
      std::this_thread::yield();
    }
    return true;
  }
  size_t open() const {
    const auto all = engine_->instances();
    return static_cast<size_t>(std::count_if(all.begin(), all.end(), [](const auto& one) { return one.open; }));
  }

  // Until the encoder's pool is open, or not.
  void set_encoder(bool there) {
    script_->set_dead(0, !there);
    const auto epoch = engine_->instances()[0].epoch;
    if (!there) threads_->die(InstanceId{0}, epoch);
    ASSERT_TRUE(wait_for([&](const auto& all) { return all[0].open == there; }));
  }
  std::vector<TokenId> want(TokenId first, int64_t tokens) {
    std::vector<TokenId> out;
    for (int64_t i = 0; i + 1 < tokens; ++i) out.push_back(first + static_cast<TokenId>(i));
    out.push_back(kEnd);
    return out;
  }

  TemporaryFolder folder_;
  FleetSettings settings_;
  std::shared_ptr<Script> script_ = std::make_shared<Script>();
  Threads* threads_ = nullptr;
  std::unique_ptr<FleetEngine> engine_;
};

TEST_F(FleetEngineTest, AnAnswerGoesOnElsewhereAfterEachToken) {
  ASSERT_TRUE(start(2).ok());
  constexpr int64_t kTokens = 9;
  for (size_t k = 0; k < kTokens; ++k) {
    ASSERT_TRUE(wait_for([&](const auto&) { return open() == 2; }));
    // Whichever has it may say k tokens; the other one none before the first is gone.
    script_->allow(0, static_cast<int64_t>(k));
    script_->allow(1, static_cast<int64_t>(k));
    const auto client = submit(100, kTokens);
    ASSERT_TRUE(client->has(k));
    ASSERT_TRUE(wait_for([](const auto& all) { return all[0].running + all[1].running == 1; }));
    const auto all = engine_->instances();
    const size_t first = all[0].running == 1 ? 0 : 1;
    threads_->die(all[first].id, all[first].epoch);
    script_->allow(1 - first, 1000);
    script_->allow(first, 1000);  // to warm up, once it is there again
    ASSERT_TRUE(client->over());
    EXPECT_EQ(client->ends, 1);
    ASSERT_TRUE((*client->end).ok()) << (*client->end).status();
    const GenerateResult& result = **client->end;
    std::vector<TokenId> want;
    for (int64_t i = 0; i + 1 < kTokens; ++i) want.push_back(static_cast<TokenId>(100 + i));
    want.push_back(kEnd);
    EXPECT_EQ(client->tokens, want) << "after " << k;
    EXPECT_EQ(result.token_ids, want);
    EXPECT_EQ(result.text, client->text);
    EXPECT_EQ(result.finish, FinishReason::kStop);
    EXPECT_EQ(result.ran_on,
              (std::vector<std::pair<std::string, std::string>>{
                  {"llm_backbone", absl::StrCat("instance ", first, ", then ", 1 - first, " of llm-pool")}}));
  }
}

TEST_F(FleetEngineTest, WordsOfAPastEpochAndOfStrangersHaveNoEffect) {
  ASSERT_TRUE(start(1).ok());
  script_->allow(0, 2);
  RequestId id;
  const auto client = submit(100, 5, &id);
  ASSERT_TRUE(client->has(2));
  const auto speak = [&](const std::string& token, int64_t instance, int64_t epoch) {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<absl::Status> why;
    auto stream = StreamClient::attach(threads_->gateway(), token, instance, epoch,
                                       {.message = [](const wire::ToInstance&) { ADD_FAILURE() << "an answer"; },
                                        .closed =
                                            [&](const absl::Status& status) {
                                              std::lock_guard lock(mutex);
                                              why = status;
                                              changed.notify_all();
                                            }});
    wire::Said hello, said;
    hello.mutable_hello()->set_pid(1);
    said.mutable_token()->set_request(id.value);
    said.mutable_token()->set_attempt(1);
    said.mutable_token()->set_token(666);
    stream->add({hello, said});
    stream->flush();
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return why.has_value(); }));
    return why.value_or(absl::OkStatus());
  };
  EXPECT_THAT(speak("another token", 0, 1).message(), HasSubstr("the run's token is needed"));
  EXPECT_FALSE(speak(kToken, 0, 0).ok());
  EXPECT_FALSE(speak(kToken, 0, 1).ok()) << "it has attached already";
  EXPECT_FALSE(speak(kToken, 7, 1).ok()) << "there is no such instance";
  EXPECT_FALSE(speak(kToken, -1, 1).ok());
  EXPECT_TRUE(wait_for([](const auto& all) { return all[0].stale >= 2; })) << "counted";
  script_->allow(0, 100);
  ASSERT_TRUE(client->over());
  EXPECT_EQ(client->tokens, (std::vector<TokenId>{100, 101, 102, 103, kEnd}));
  EXPECT_EQ(engine_->instances()[0].failures, 0);
}

TEST_F(FleetEngineTest, AClientThatLeavesFreesItsPlace) {
  ASSERT_TRUE(start(1).ok());
  script_->allow(0, 1);
  RequestId id;
  const auto client = submit(100, 50, &id);
  ASSERT_TRUE(client->has(1));
  engine_->cancel(id);
  ASSERT_TRUE(client->over());
  ASSERT_TRUE((*client->end).ok());
  EXPECT_EQ((**client->end).finish, FinishReason::kNone);
  EXPECT_TRUE(wait_for([](const auto& all) { return all[0].running == 0; }));
  script_->allow(0, 1000);
  const auto next = submit(7, 3);
  ASSERT_TRUE(next->over());
  EXPECT_EQ(next->tokens, (std::vector<TokenId>{7, 8, kEnd}));
}

TEST_F(FleetEngineTest, RequestsWaitForTheOnlyInstanceToComeBack) {
  ASSERT_TRUE(start(1).ok());
  int changes = 0;
  std::mutex mutex;
  engine_->watch_capacity([&] {
    std::lock_guard lock(mutex);
    ++changes;
  });
  script_->allow(0, 3);
  const auto client = submit(100, 6);
  ASSERT_TRUE(client->has(3));
  threads_->die(InstanceId{0}, 1);
  script_->allow(0, 100);
  ASSERT_TRUE(client->over());
  EXPECT_EQ(client->tokens, (std::vector<TokenId>{100, 101, 102, 103, 104, kEnd}));
  EXPECT_EQ(engine_->instances()[0].epoch, 2);
  EXPECT_EQ(engine_->instances()[0].failures, 1);
  EXPECT_TRUE(engine_->health().ok());
  EXPECT_EQ(engine_->max_running(), 4);
  std::lock_guard lock(mutex);
  EXPECT_EQ(changes, 2) << "gone, and back";
}

TEST_F(FleetEngineTest, ADrainingInstanceFinishesAndEnds) {
  ASSERT_TRUE(start(2).ok());
  script_->allow(0, 1);
  script_->allow(1, 1);
  const auto client = submit(100, 4);
  ASSERT_TRUE(client->has(1));
  const size_t first = engine_->instances()[0].running == 1 ? 0 : 1;
  engine_->drain(InstanceId{static_cast<int64_t>(first)});
  ASSERT_TRUE(wait_for([&](const auto& all) { return all[first].state == InstanceState::kDraining; }));
  const auto other = submit(7, 1);
  script_->allow(1 - first, 10);
  ASSERT_TRUE(other->over());
  EXPECT_EQ(engine_->instances()[first].state, InstanceState::kDraining) << "one request is there yet";
  script_->allow(first, 100);
  ASSERT_TRUE(client->over());
  EXPECT_EQ(client->tokens.size(), 4u);
  EXPECT_THAT((**client->end).ran_on[0].second, absl::StrCat("instance ", first, " of llm-pool"));
  EXPECT_TRUE(wait_for([&](const auto& all) { return all[first].state == InstanceState::kGone; }));
  EXPECT_EQ(engine_->max_running(), 4);
}

TEST_F(FleetEngineTest, AnInstanceThatRefusesItsModulesSaysWhyAtTheStart) {
  script_->refusal = invalid("the weights do not fit");
  const absl::Status status = start(2);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("of llm-pool cannot start: the weights do not fit"));
}

TEST_F(FleetEngineTest, AnInstanceThatGeneratesTakesTheEncoderOnAndGivesItBack) {
  settings_.add_after_s = settings_.add_idle_s = 0.05;
  ASSERT_TRUE(start_apart().ok());
  const auto one = submit(100, 4, nullptr, 9);
  ASSERT_TRUE(one->over());
  EXPECT_EQ(one->tokens, want(109, 4));
  EXPECT_EQ((**one->end).ran_on[0],
            (std::pair<std::string, std::string>{"vision_encoder", "instance 0 of encoder-pool"}));
  for (int round = 1; round <= 2; ++round) {
    set_encoder(false);
    EXPECT_TRUE(engine_->accepts_images().ok()) << "somebody can take it on";
    script_->allow(1, 3);
    script_->allow(2, 3);
    const auto text = submit(50, 9);
    ASSERT_TRUE(text->has(3));
    const auto image = submit(100, 4, nullptr, static_cast<uint8_t>(10 + round));
    ASSERT_TRUE(wait_for([](const auto& all) {
      return all[1].added == AddedEncoder::kEncodes || all[2].added == AddedEncoder::kEncodes;
    }));
    const int64_t added = engine_->instances()[1].added == AddedEncoder::kEncodes ? 1 : 2;
    script_->allow(1, 100);
    script_->allow(2, 100);
    ASSERT_TRUE(image->over() && text->over());
    EXPECT_EQ(image->tokens, want(110 + round, 4));
    EXPECT_EQ(text->tokens, want(50, 9));
    EXPECT_EQ((**image->end).ran_on[0].second, absl::StrCat("instance ", added, " of llm-pool"));
    set_encoder(true);
    ASSERT_TRUE(
        wait_for([&](const auto& all) { return all[static_cast<size_t>(added)].added == AddedEncoder::kNone; }));
    const auto after = submit(100, 2, nullptr, static_cast<uint8_t>(20 + round));
    ASSERT_TRUE(after->over());
    EXPECT_EQ(after->tokens, want(120 + round, 2));
    EXPECT_EQ((**after->end).ran_on[0].second, "instance 0 of encoder-pool");
  }
  EXPECT_EQ(script_->encoders[1] + script_->encoders[2], 2);
  for (const size_t id : {1, 2}) EXPECT_EQ(engine_->instances()[id].failures, 0);
}

TEST_F(FleetEngineTest, WithoutAnEncoderAndWithoutRoomForOneNewImagesAreRefusedAndTextGoesOn) {
  settings_.add_after_s = 0.05;
  settings_.park_s = 2;
  ASSERT_TRUE(start_apart().ok());
  {
    std::lock_guard lock(script_->mutex);
    script_->encoder_refusal = invalid("the weights do not fit");
  }
  set_encoder(false);
  const auto image = submit(100, 4, nullptr, 9);
  ASSERT_TRUE(wait_for([&](const auto&) { return engine_->parked(true) == 1; }));
  const double end_s = kClock.now_seconds() + 30;
  while (engine_->accepts_images().ok() && kClock.now_seconds() < end_s) std::this_thread::yield();
  EXPECT_TRUE(absl::IsUnavailable(engine_->accepts_images()));
  EXPECT_TRUE(engine_->accepts().ok());
  const auto text = submit(50, 9);
  ASSERT_TRUE(text->over());
  EXPECT_EQ(text->tokens, want(50, 9));
  ASSERT_TRUE(image->over()) << "by its limit";
  EXPECT_TRUE(absl::IsUnavailable((*image->end).status())) << (*image->end).status();
  EXPECT_EQ(engine_->parked(true), 0);
  for (const size_t id : {1, 2}) {
    EXPECT_EQ(script_->encoders[id], 1) << "each was asked once";
    EXPECT_EQ(engine_->instances()[id].failures, 0);
    EXPECT_EQ(engine_->instances()[id].added, AddedEncoder::kNone);
  }
}

TEST_F(FleetEngineTest, WhatStillRunsEndsWithTheEngine) {
  ASSERT_TRUE(start(1).ok());
  script_->allow(0, 1);
  const auto client = submit(100, 50);
  ASSERT_TRUE(client->has(1));
  engine_.reset();
  ASSERT_EQ(client->ends, 1);
  ASSERT_TRUE((*client->end).ok());
  EXPECT_EQ((**client->end).finish, FinishReason::kNone);
  EXPECT_EQ((**client->end).token_ids, (std::vector<TokenId>{100}));
}

}  // namespace
}  // namespace parvl
