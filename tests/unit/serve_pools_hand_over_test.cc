// Answers that are begun on one instance and go on on another, over real streams and transfers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/fleet_engine_fixture.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

using HandOverTest = FleetEngineTest;

TEST_F(HandOverTest, ManyAnswersPassThroughLittleMemory) {
  ASSERT_TRUE(start_halves().ok());
  std::vector<std::shared_ptr<Client>> clients;
  for (int i = 0; i < 12; ++i)
    clients.push_back(submit(100 + static_cast<uint64_t>(i), 1 + i % 4, nullptr, i % 3 == 0 ? 3 : 0));
  for (int i = 0; i < 12; ++i) {
    ASSERT_TRUE(clients[static_cast<size_t>(i)]->over());
    const auto& end = *clients[static_cast<size_t>(i)]->end;
    ASSERT_TRUE(end.ok()) << end.status();
    EXPECT_EQ(clients[static_cast<size_t>(i)]->tokens, want(100 + i, 1 + i % 4));
    const std::string where = end->ran_on.back().second;
    EXPECT_THAT(where, HasSubstr("instance 0 of prefill-pool"));
    EXPECT_EQ(where.find("decode-pool") == std::string::npos, i % 4 == 0) << "one token, which ends it: " << where;
  }
}

TEST_F(HandOverTest, AnAnswerGoesOnWhenEitherIsLostAfterEachToken) {
  ASSERT_TRUE(start_halves().ok());
  constexpr int64_t kTokens = 6;
  for (int64_t tokens = 1; tokens < kTokens; ++tokens) {
    for (const int64_t lost : {0, 1}) {
      SCOPED_TRACE(testing::Message() << tokens << " tokens, then instance " << lost << " is lost");
      script_->allow(0, 1);
      script_->allow(1, tokens - 1);
      script_->allow(2, 0);
      const auto client = submit(100, kTokens);
      ASSERT_TRUE(client->has(static_cast<size_t>(tokens)));
      const int64_t epoch = engine_->instances()[static_cast<size_t>(lost)].epoch;
      threads_->die(InstanceId{lost}, epoch);
      for (const size_t all : {0, 1, 2}) script_->allow(all, 100);
      ASSERT_TRUE(client->over());
      ASSERT_TRUE((*client->end).ok()) << (*client->end).status();
      EXPECT_EQ(client->tokens, want(100, kTokens));
      EXPECT_EQ(client->ends, 1);
      ASSERT_TRUE(wait_for([&](const auto& all) {
        return all[static_cast<size_t>(lost)].epoch > epoch && all[0].open && all[1].open && all[2].open;
      }));
    }
  }
}

TEST_F(HandOverTest, KeysAndValuesThatNobodyTakesStopThePromptsAfterThemAndAClientThatLeavesFreesThem) {
  ASSERT_TRUE(start_halves().ok());
  script_->allow(1, 0);
  script_->allow(2, 0);
  std::vector<RequestId> ids(4);
  std::vector<std::shared_ptr<Client>> clients;
  for (int i = 0; i < 4; ++i) clients.push_back(submit(100, 3, &ids[static_cast<size_t>(i)]));
  ASSERT_TRUE(clients[0]->has(1));
  ASSERT_TRUE(clients[1]->has(1));
  EXPECT_TRUE(clients[2]->tokens.empty()) << "there is room for two";
  engine_->cancel(ids[0]);
  ASSERT_TRUE(clients[0]->over());
  ASSERT_TRUE(clients[2]->has(1)) << "in its place";
  EXPECT_TRUE(clients[3]->tokens.empty());
  script_->allow(1, 100);
  script_->allow(2, 100);
  for (int i = 1; i < 4; ++i) {
    ASSERT_TRUE(clients[static_cast<size_t>(i)]->over());
    EXPECT_EQ(clients[static_cast<size_t>(i)]->tokens, want(100, 3));
  }
}

TEST_F(HandOverTest, WithoutWhoeverGoesOnNothingNewIsTaken) {
  ASSERT_TRUE(start_halves().ok());
  EXPECT_EQ(engine_->max_running(), 8) << "of the two that go on";
  for (const size_t one : {1, 2}) script_->set_dead(one, true);
  for (const int64_t one : {1, 2}) threads_->die(InstanceId{one}, engine_->instances()[static_cast<size_t>(one)].epoch);
  ASSERT_TRUE(wait_for([](const auto& all) { return !all[1].open && !all[2].open; }));
  EXPECT_THAT(engine_->accepts().message(), HasSubstr("decode-pool: instance 1 is"));
  EXPECT_EQ(engine_->max_running(), 0);
  const auto client = submit(100, 3);  // one that had been accepted before
  ASSERT_TRUE(client->has(1));
  for (const size_t one : {1, 2}) script_->set_dead(one, false);
  ASSERT_TRUE(client->over());
  EXPECT_EQ(client->tokens, want(100, 3));
}

}  // namespace
}  // namespace parvl
