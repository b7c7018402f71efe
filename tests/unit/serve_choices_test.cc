// What a request asks of the engine beside its prompt: several choices, priority, cache salt, cached tokens.
#include "tests/unit/serve_fixture.h"

namespace parvl {
namespace {

using testing::ElementsAre;

TEST_F(ServerTest, EachChoiceIsAGenerationOfItsOwn) {
  script_->cached_tokens = 5;
  start();
  Json body = user_says("hi");
  body.update({{"n", 3}, {"seed", 40}, {"priority", -2}, {"cache_salt", "tenant"}, {"logprobs", true}});
  const TestReply reply = chat(body);
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json json = reply.json();
  ASSERT_EQ(json["choices"].size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(json["choices"][i]["index"], i);
    EXPECT_EQ(json["choices"][i]["message"]["content"], "Hello!");
    EXPECT_EQ(json["choices"][i]["finish_reason"], "stop");
    EXPECT_EQ(json["choices"][i]["logprobs"]["content"].size(), 4u);
    EXPECT_EQ(script_->samplings[i].seed, 40 + i);
  }
  const int64_t prompt = static_cast<int64_t>(script_->prompts[0].ids.size());
  EXPECT_EQ(json["usage"]["prompt_tokens"], prompt);
  EXPECT_EQ(json["usage"]["completion_tokens"], 12);
  EXPECT_EQ(json["usage"]["total_tokens"], prompt + 12);
  EXPECT_EQ(json["usage"]["prompt_tokens_details"]["cached_tokens"], 5);  // not those that the first choice computed
  EXPECT_THAT(script_->priorities, ElementsAre(-2, -2, -2));
  EXPECT_THAT(script_->salts, ElementsAre("tenant", "tenant", "tenant"));
}

TEST_F(ServerTest, StreamedChoicesCarryTheirIndex) {
  start();
  Json body = user_says("hi");
  body.update({{"n", 2}, {"stream", true}, {"stream_options", {{"include_usage", true}}}});
  const auto events = chat(body).events();
  std::vector<std::string> texts(2);
  std::vector<int> roles(2), finishes(2);
  for (size_t i = 0; i + 2 < events.size(); ++i) {
    const Json choice = Json::parse(events[i])["choices"][0];
    const size_t index = choice["index"];
    ASSERT_LT(index, 2u);
    EXPECT_EQ(finishes[index], 0) << "nothing comes after the finish chunk";
    if (choice["delta"].contains("role")) {
      EXPECT_EQ(texts[index], "");
      ++roles[index];
    }
    if (choice["delta"].contains("content")) texts[index] += choice["delta"]["content"].get<std::string>();
    if (choice["finish_reason"] == "stop") ++finishes[index];
  }
  EXPECT_THAT(texts, ElementsAre("Hello!", "Hello!"));
  EXPECT_THAT(roles, ElementsAre(1, 1));
  EXPECT_THAT(finishes, ElementsAre(1, 1));
  ASSERT_GE(events.size(), 2u);
  EXPECT_EQ(Json::parse(events[events.size() - 2])["usage"]["completion_tokens"], 8);
  EXPECT_EQ(events.back(), "[DONE]");
}

TEST_F(ServerTest, AFailedChoiceFailsTheRequest) {
  start();
  {
    std::lock_guard lock(script_->mutex);
    script_->fail_after = 0;
    script_->error = failed("device lost");
  }
  Json body = user_says("hi");
  body["n"] = 3;
  EXPECT_EQ(chat(body).status, 500);
  ASSERT_TRUE(wait_admitted(0));
  {
    std::lock_guard lock(script_->mutex);
    script_->fail_after = -1;
  }
  EXPECT_EQ(chat(user_says("hi")).status, 200);
}

TEST_F(ServerTest, ChoicesTakePlacesInTheQueue) {
  options_.max_queue = 2;
  start();
  close_gate();
  Json body = user_says("hi");
  body["n"] = 3;  // one runs, two wait
  TestClient client(server_->port());
  client.send(chat_request(body));
  ASSERT_TRUE(wait_admitted(3));
  EXPECT_EQ(chat(user_says("one too many")).status, 429);
  open_gate();
  EXPECT_EQ(client.read_reply().status, 200);
  ASSERT_TRUE(wait_admitted(0));
}

TEST_F(ServerTest, ALowerPriorityNumberIsServedFirst) {
  start();
  close_gate();
  std::vector<std::unique_ptr<TestClient>> clients;
  for (const int priority : {0, 0, 3, -3}) {  // the first runs, the second is made ready
    Json body = user_says("priority " + std::to_string(priority));
    body["priority"] = priority;
    clients.push_back(std::make_unique<TestClient>(server_->port()));
    clients.back()->send(chat_request(body));
    ASSERT_TRUE(wait_admitted(clients.size()));
  }
  open_gate();
  for (auto& client : clients) EXPECT_EQ(client->read_reply().status, 200);
  std::lock_guard lock(script_->mutex);
  EXPECT_THAT(script_->priorities, ElementsAre(0, 0, -3, 3));
}

}  // namespace
}  // namespace parvl
