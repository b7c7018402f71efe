// The gateway's engine over real streams.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parvl/serve/pools/stream_client.h"
#include "parvl/serve/pools/stream_server.h"
#include "tests/unit/fleet_engine_fixture.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

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

TEST_F(FleetEngineTest, AnInstanceThatIsStartedAgainRefusesAModelThatHasChanged) {
  ASSERT_TRUE(start(1).ok());
  write_model_folder(folder_.path());  // the same content, in other files
  threads_->die(InstanceId{0}, 1);
  ASSERT_TRUE(wait_for([](const auto& all) { return all[0].failures >= 2; }));
  const InstanceStatus refused = engine_->instances()[0];
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.refusal)) << refused.refusal;
  EXPECT_THAT(refused.reason, HasSubstr("the files of " + folder_.path() + " have changed since the server started"));
  EXPECT_THAT(refused.reason, HasSubstr("restart the server"));
  EXPECT_EQ(script_->started[0], 1) << "nothing was loaded";
}

TEST_F(FleetEngineTest, AModelThatChangesWhileItIsLoadedIsRefused) {
  script_->on_load = [this] { write_model_folder(folder_.path()); };
  const absl::Status status = start(1);
  EXPECT_THAT(status.message(), HasSubstr("have changed since the server started")) << status;
}

TEST_F(FleetEngineTest, AnEncoderOfAModelThatHasChangedIsNotAdded) {
  settings_.add_after_s = 0.05;
  settings_.park_s = 2;
  ASSERT_TRUE(start_apart().ok());
  write_model_folder(folder_.path());
  set_encoder(false);
  const auto image = submit(100, 4, nullptr, 9);
  ASSERT_TRUE(image->over()) << "by its limit";
  EXPECT_TRUE(absl::IsUnavailable((*image->end).status())) << (*image->end).status();
  for (const size_t id : {1, 2}) {
    EXPECT_EQ(engine_->instances()[id].added, AddedEncoder::kNone);
    EXPECT_EQ(script_->encoders[id], 0) << "nothing was loaded";
    EXPECT_TRUE(engine_->instances()[id].open) << "it goes on with what it has";
  }
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
  EXPECT_TRUE(wait_for([&](const auto&) { return engine_->parked(true) == 0; }));
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
