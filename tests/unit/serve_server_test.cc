// The whole server over real sockets, with a generator that a test controls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "parvl/base/file.h"
#include "parvl/serve/server.h"
#include "tests/unit/serve_client.h"
#include "tests/unit/serve_fake.h"

namespace parvl {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;

class ServerTest : public testing::Test {
 protected:
  ServerTest() {
    write_model_folder(folder_.path());
    options_.port = 0;
    options_.served_names = {"tiny", "alias"};
    options_.model_dir = "models/tiny";
    options_.version = "9.9";
    options_.seed = 1;
  }

  ~ServerTest() override { stop(); }

  void start() {
    start_with([this] { return std::make_unique<FakeGenerator>(script_, folder_.path(), 200); });
    ASSERT_TRUE(ready_.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready);
  }

  void start_with(Server::Loader load) {
    auto server = Server::listen(options_, clock_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
    thread_ = std::thread([this, load] { result_ = server_->run(load, [this] { ready_.set_value(); }); });
  }

  void stop() {
    if (server_ == nullptr) return;
    script_->allow(1 << 30);
    server_->shutdown();
    join();
    server_.reset();
  }

  void join() {
    if (thread_.joinable()) thread_.join();
  }

  TestReply chat(const Json& body, const std::string& headers = "") {
    TestClient client(server_->port());
    return client.chat(body, headers);
  }
  TestReply get(const std::string& path, const std::string& headers = "") {
    TestClient client(server_->port());
    return client.get(path, headers);
  }

  // A generation that says "Hello!" only as far as it is allowed.
  void close_gate() {
    std::lock_guard lock(script_->mutex);
    script_->allowed = 0;
  }
  void open_gate() { script_->allow(1 << 30); }
  // Until so many requests are past admission (at most 20 s).
  bool wait_admitted(size_t count) {
    const int64_t end = clock_.now_ns() + 20'000'000'000;
    while (server_->admitted() != count && clock_.now_ns() < end) std::this_thread::yield();
    return server_->admitted() == count;
  }
  bool wait_started(int64_t count) {
    return script_->wait_for([&] { return script_->started >= count; });
  }

  TemporaryFolder folder_;
  RealClock clock_;
  ServeOptions options_;
  std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  std::promise<void> ready_;
  std::unique_ptr<Server> server_;
  std::thread thread_;
  absl::Status result_;
};

TEST_F(ServerTest, AnswersWithOneObject) {
  start();
  const TestReply reply = chat(user_says("hi"), "X-Request-Id: abc-1\r\n");
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json json = reply.json();
  EXPECT_EQ(json["object"], "chat.completion");
  EXPECT_TRUE(json["id"].get<std::string>().starts_with("chatcmpl-"));
  EXPECT_EQ(json["model"], "tiny");
  EXPECT_EQ(json["choices"].size(), 1u);
  EXPECT_EQ(json["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(json["choices"][0]["message"]["content"], "Hello!");
  EXPECT_EQ(json["choices"][0]["finish_reason"], "stop");
  EXPECT_TRUE(json["choices"][0]["logprobs"].is_null());
  EXPECT_EQ(json["usage"]["completion_tokens"], 4);
  const int64_t prompt = json["usage"]["prompt_tokens"];
  EXPECT_EQ(prompt, static_cast<int64_t>(script_->prompts[0].ids.size()));
  EXPECT_EQ(json["usage"]["total_tokens"], prompt + 4);
  EXPECT_EQ(reply.headers.at("x-request-id"), "abc-1");
  EXPECT_EQ(reply.headers.at("content-type"), "application/json");
}

TEST_F(ServerTest, RequestIdIsMadeWhenNoneOrAnUnusableOneIsSent) {
  start();
  EXPECT_TRUE(get("/livez").headers.at("x-request-id").starts_with("req-"));
  EXPECT_TRUE(
      get("/livez", "X-Request-Id: " + std::string(200, 'x') + "\r\n").headers.at("x-request-id").starts_with("req-"));
  EXPECT_NE(get("/livez").headers.at("x-request-id"), get("/livez").headers.at("x-request-id"));
}

TEST_F(ServerTest, StreamsRoleContentFinishDone) {
  start();
  Json body = user_says("hi");
  body["stream"] = true;
  const TestReply reply = chat(body);
  ASSERT_EQ(reply.status, 200);
  EXPECT_TRUE(reply.whole);
  EXPECT_THAT(reply.headers.at("content-type"), HasSubstr("text/event-stream"));
  const auto events = reply.events();
  ASSERT_EQ(events.size(), 6u) << reply.body;
  std::string text;
  for (size_t i = 0; i < 5; ++i) {
    const Json chunk = Json::parse(events[i]);
    EXPECT_EQ(chunk["object"], "chat.completion.chunk");
    EXPECT_EQ(chunk["id"], Json::parse(events[0])["id"]);
    EXPECT_FALSE(chunk.contains("usage"));
    const Json& choice = chunk["choices"][0];
    if (i == 0) {
      EXPECT_EQ(choice["delta"]["role"], "assistant");
      EXPECT_EQ(choice["delta"]["content"], "");
    } else if (i == 4) {
      EXPECT_EQ(choice["delta"], Json::object());
      EXPECT_EQ(choice["finish_reason"], "stop");
    } else {
      text += choice["delta"]["content"].get<std::string>();
      EXPECT_TRUE(choice["finish_reason"].is_null());
    }
  }
  EXPECT_EQ(text, "Hello!");
  EXPECT_EQ(events[5], "[DONE]");
}

TEST_F(ServerTest, UsageChunkOnRequestOnly) {
  start();
  Json body = user_says("hi");
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  body["max_tokens"] = 2;
  const auto events = chat(body).events();
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.back(), "[DONE]");
  const Json usage = Json::parse(events[events.size() - 2]);
  EXPECT_EQ(usage["choices"], Json::array());
  EXPECT_EQ(usage["usage"]["completion_tokens"], 2);
  EXPECT_TRUE(Json::parse(events[0])["usage"].is_null());
  EXPECT_EQ(Json::parse(events[events.size() - 3])["choices"][0]["finish_reason"], "length");
}

TEST_F(ServerTest, LogprobsComeWithEveryToken) {
  start();
  Json body = user_says("hi");
  body["logprobs"] = true;
  body["top_logprobs"] = 2;
  const Json content = chat(body).json()["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 4u);
  EXPECT_EQ(content[0]["token"], "H");
  EXPECT_EQ(content[0]["bytes"], Json::array({72}));
  EXPECT_EQ(content[0]["logprob"], -0.5);
  EXPECT_EQ(content[0]["top_logprobs"].size(), 2u);
  EXPECT_EQ(content[0]["top_logprobs"][0]["token"], "\xef\xbf\xbd");  // byte 200 alone is no character
  EXPECT_EQ(content[0]["top_logprobs"][0]["bytes"], Json::array({200}));

  body["stream"] = true;
  size_t entries = 0;
  for (const std::string& event : chat(body).events()) {
    if (event == "[DONE]") continue;
    const Json choice = Json::parse(event)["choices"][0];
    if (!choice["logprobs"].is_null()) entries += choice["logprobs"]["content"].size();
    if (choice["finish_reason"] == "stop") {
      EXPECT_EQ(choice["delta"], Json::object());
    }
  }
  EXPECT_EQ(entries, 4u);
}

TEST_F(ServerTest, NothingIsSentBeforeTheFirstToken) {
  start();
  close_gate();
  Json body = user_says("hi");
  body["stream"] = true;
  TestClient client(server_->port());
  client.send(chat_request(body));
  ASSERT_TRUE(wait_started(1));
  {
    std::lock_guard lock(script_->mutex);
    script_->fail_after = 1;  // the first token, then a failure
    script_->error = failed("device lost");
  }
  // A probe on another connection goes through the same thread: what was to be sent before it has been sent.
  EXPECT_EQ(get("/livez").status, 200);
  open_gate();
  const TestReply reply = client.read_reply();
  EXPECT_EQ(reply.status, 200);
  EXPECT_TRUE(reply.whole);
  const auto events = reply.events();
  ASSERT_FALSE(events.empty());
  EXPECT_TRUE(events.back().starts_with("error:")) << reply.body;
  EXPECT_EQ(Json::parse(events.back().substr(6))["error"]["type"], "server_error");
  EXPECT_THAT(reply.body, testing::Not(HasSubstr("[DONE]")));
}

TEST_F(ServerTest, FailureBeforeTheFirstTokenIsAStatusAlsoForAStream) {
  start();
  script_->fail_after = 0;
  script_->error = failed("device lost");
  Json body = user_says("hi");
  EXPECT_EQ(chat(body).status, 500);
  body["stream"] = true;
  EXPECT_EQ(chat(body).status, 500);
  script_->error = invalid("no room");
  EXPECT_EQ(chat(body).status, 400);
  script_->fail_after = -1;
  EXPECT_EQ(chat(body).status, 200);  // the server goes on
}

TEST_F(ServerTest, DefaultsAndFieldsReachTheGenerator) {
  start();
  EXPECT_EQ(chat(user_says("hi")).status, 200);
  Json body = user_says("hi");
  body.update({{"temperature", 0},
               {"top_k", 5},
               {"seed", -3},
               {"stop", "x"},
               {"max_completion_tokens", 3},
               {"max_tokens", 9},
               {"logit_bias", {{"7", -1.5}}},
               {"min_p", nullptr},
               {"made_up", 1},
               {"model", "alias"}});
  const TestReply reply = chat(body);
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.json()["model"], "alias");
  const SamplingParams first = script_->samplings[0], second = script_->samplings[1];
  EXPECT_EQ(first.temperature, 0.5);  // the model's default
  EXPECT_EQ(first.max_tokens, -1);
  EXPECT_EQ(second.temperature, 0);
  EXPECT_EQ(second.top_k, 5);
  EXPECT_EQ(second.seed, static_cast<uint64_t>(-3));
  EXPECT_THAT(second.stop, ElementsAre("x"));
  EXPECT_EQ(second.max_tokens, 3);
  EXPECT_EQ(second.logit_bias.at(7), -1.5);
  EXPECT_EQ(chat(user_says("hi")).status, 200);
  EXPECT_NE(script_->samplings[2].seed, first.seed);  // no seed asked for: a new one each time
}

TEST_F(ServerTest, ModelsVersionAndProbes) {
  start();
  const Json list = get("/v1/models").json();
  ASSERT_EQ(list["data"].size(), 2u);
  EXPECT_EQ(list["data"][0]["id"], "tiny");
  EXPECT_EQ(list["data"][0]["max_model_len"], 200);
  EXPECT_EQ(list["data"][0]["parvl"]["modules"]["vision_encoder"], "test");
  EXPECT_EQ(get("/v1/models/alias").json()["id"], "alias");
  EXPECT_EQ(get("/v1/models/other").status, 404);
  EXPECT_EQ(get("/version").json()["version"], "9.9");
  for (const char* path : {"/livez", "/readyz", "/health", "/health?verbose=1"})
    EXPECT_EQ(get(path).status, 200) << path;
}

TEST_F(ServerTest, WrongRoutesAndMethods) {
  start();
  EXPECT_EQ(get("/metrics").status, 404);
  EXPECT_EQ(get("/nothing").code(), "route_not_found");
  EXPECT_EQ(get("/v1/chat/completions").status, 405);
  EXPECT_EQ(get("/v1/chat/completions").headers.at("allow"), "POST");
  for (const char* path : {"/v1/completions", "/tokenize", "/detokenize"}) {
    TestClient client(server_->port());
    const TestReply reply = client.post(path, "{}");
    EXPECT_EQ(reply.status, 400);
    EXPECT_THAT(reply.message(), HasSubstr("not available yet"));
  }
  TestClient client(server_->port());
  client.send(http_request("HEAD", "/health", ""));
  const TestReply head = client.read_reply(true);
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(client.get("/livez").status, 200);  // no body was sent that would be taken for this answer
}

TEST_F(ServerTest, BadBodiesNameTheField) {
  start();
  TestClient client(server_->port());
  TestReply reply = client.post("/v1/chat/completions", "{\"messages\": [");
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.json()["error"]["type"], "invalid_request_error");
  EXPECT_THAT(reply.message(), HasSubstr("not valid JSON"));
  reply = client.post("/v1/chat/completions", "");
  EXPECT_EQ(reply.status, 400);
  Json body = user_says("hi");
  body["temperature"] = "hot";
  reply = client.chat(body);
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.param(), "temperature");
  body = user_says("hi");
  body["model"] = "other";
  reply = client.chat(body);
  EXPECT_EQ(reply.status, 404);
  EXPECT_EQ(reply.code(), "model_not_found");
  body = user_says(std::string(300, 'x'));
  reply = client.chat(body);
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.code(), "context_length_exceeded");
  EXPECT_THAT(reply.message(), HasSubstr("200"));
  body = user_says(std::string(190, 'x'));  // fits alone, not with the template around it
  EXPECT_EQ(client.chat(body).code(), "context_length_exceeded");
}

TEST_F(ServerTest, KeyGuardsEveryRouteButTheProbes) {
  options_.api_keys = {"first", "second"};
  start();
  for (const char* path : {"/livez", "/readyz", "/health"}) EXPECT_EQ(get(path).status, 200);
  for (const char* path : {"/v1/models", "/version", "/metrics", "/nothing"}) EXPECT_EQ(get(path).status, 401) << path;
  EXPECT_EQ(chat(user_says("hi")).status, 401);
  EXPECT_EQ(chat(user_says("hi"), "Authorization: Bearer firs\r\n").code(), "invalid_api_key");
  EXPECT_EQ(chat(user_says("hi"), "Authorization: Basic first\r\n").status, 401);
  EXPECT_EQ(chat(user_says("hi"), "Authorization: Bearer \r\n").status, 401);
  EXPECT_EQ(chat(user_says("hi"), "Authorization: Bearer first\r\n").status, 200);
  EXPECT_EQ(chat(user_says("hi"), "authorization: bearer second\r\n").status, 200);
}

TEST_F(ServerTest, ConnectionIsKeptAndTakesPipelinedRequests) {
  start();
  TestClient client(server_->port());
  EXPECT_EQ(client.chat(user_says("a")).status, 200);
  EXPECT_EQ(client.get("/nothing").status, 404);
  EXPECT_EQ(client.chat(user_says("b")).status, 200);
  client.send(chat_request(user_says("c")) + http_request("GET", "/version", "") + chat_request(user_says("d")));
  EXPECT_EQ(client.read_reply().json()["object"], "chat.completion");
  EXPECT_EQ(client.read_reply().json()["version"], "9.9");
  EXPECT_EQ(client.read_reply().json()["object"], "chat.completion");
}

TEST_F(ServerTest, Http10StreamEndsWithTheConnection) {
  start();
  Json body = user_says("hi");
  body["stream"] = true;
  const std::string text = body.dump();
  TestClient client(server_->port());
  client.send("POST /v1/chat/completions HTTP/1.0\r\nContent-Length: " + std::to_string(text.size()) + "\r\n\r\n" +
              text);
  const TestReply reply = client.read_reply();
  EXPECT_EQ(reply.status, 200);
  EXPECT_FALSE(reply.headers.contains("transfer-encoding"));
  EXPECT_EQ(reply.events().back(), "[DONE]");
}

TEST_F(ServerTest, FullQueueIs429) {
  options_.max_queue = 2;
  start();
  close_gate();
  std::vector<std::unique_ptr<TestClient>> clients;
  for (size_t i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<TestClient>(server_->port()));
    clients.back()->send(chat_request(user_says("x")));
    ASSERT_TRUE(wait_admitted(i + 1));
  }
  const TestReply reply = chat(user_says("one too many"));
  EXPECT_EQ(reply.status, 429);
  EXPECT_EQ(reply.code(), "queue_full");
  EXPECT_THAT(reply.message(), HasSubstr("--max-queue"));
  EXPECT_EQ(reply.headers.at("retry-after"), "1");
  EXPECT_EQ(reply.json()["error"]["type"], "rate_limit_error");
  open_gate();
  for (auto& client : clients) EXPECT_EQ(client->read_reply().status, 200);
  ASSERT_TRUE(wait_admitted(0));
  EXPECT_EQ(chat(user_says("room again")).status, 200);
}

TEST_F(ServerTest, AClientThatLeavesWhileWaitingFreesItsPlaceAndIsNeverRun) {
  options_.max_queue = 3;
  start();
  close_gate();
  std::vector<std::unique_ptr<TestClient>> clients;
  for (size_t i = 0; i < 4; ++i) {
    clients.push_back(std::make_unique<TestClient>(server_->port()));
    clients.back()->send(chat_request(user_says("request " + std::to_string(i))));
    ASSERT_TRUE(wait_admitted(i + 1));
  }
  clients[2]->close();  // of the two that wait without a turn
  ASSERT_TRUE(wait_admitted(3));
  clients[3]->shut_down_sending();  // half a goodbye counts too
  ASSERT_TRUE(wait_admitted(2));
  TestClient next(server_->port());
  next.send(chat_request(user_says("next")));
  ASSERT_TRUE(wait_admitted(3));
  open_gate();
  EXPECT_EQ(clients[0]->read_reply().status, 200);
  EXPECT_EQ(clients[1]->read_reply().status, 200);
  EXPECT_EQ(next.read_reply().status, 200);
  std::lock_guard lock(script_->mutex);
  EXPECT_EQ(script_->started, 3);
}

TEST_F(ServerTest, DisconnectCancelsWhatRuns) {
  start();
  {
    std::lock_guard lock(script_->mutex);
    script_->endless = true;
  }
  for (const bool stream : {true, false}) {
    const int64_t before = script_->cancelled;  // nothing runs now
    Json body = user_says("hi");
    body["stream"] = stream;
    close_gate();
    TestClient client(server_->port());
    client.send(chat_request(body));
    ASSERT_TRUE(wait_started(before + 1));
    script_->allow(1);
    if (stream) {
      EXPECT_THAT(client.read_until("\n\n"), HasSubstr("200 OK"));
    }
    client.close();
    ASSERT_TRUE(wait_admitted(0));
    bool cancelled = false;
    for (int i = 0; i < 10 && !cancelled; ++i) {
      script_->allow(1);
      EXPECT_TRUE(script_->wait_for([&] { return script_->allowed == 0 || script_->cancelled > before; }));
      std::lock_guard lock(script_->mutex);
      cancelled = script_->cancelled > before;
    }
    EXPECT_TRUE(cancelled);
  }
}

TEST_F(ServerTest, ProbesSayLoadingUntilTheModelIsThere) {
  std::promise<void> go;
  start_with([&, wait = go.get_future().share()]() -> absl::StatusOr<std::unique_ptr<Generator>> {
    wait.wait();
    return std::make_unique<FakeGenerator>(script_, folder_.path(), 200);
  });
  EXPECT_EQ(get("/livez").status, 200);
  EXPECT_EQ(get("/readyz").status, 503);
  EXPECT_EQ(get("/health").code(), "loading");
  const TestReply reply = chat(user_says("hi"));
  EXPECT_EQ(reply.status, 503);
  EXPECT_TRUE(reply.headers.contains("retry-after"));
  EXPECT_EQ(get("/v1/models").status, 503);
  go.set_value();
  ready_.get_future().wait();
  EXPECT_EQ(get("/readyz").status, 200);
  EXPECT_EQ(chat(user_says("hi")).status, 200);
}

TEST_F(ServerTest, LoadFailureEndsRun) {
  start_with([]() -> absl::StatusOr<std::unique_ptr<Generator>> { return invalid("no config.json in models/tiny"); });
  join();
  EXPECT_EQ(exit_code(result_), 2);
  EXPECT_EQ(result_.message(), "no config.json in models/tiny");
}

TEST_F(ServerTest, ShutdownWhileLoadingDoesNotWaitForTheLoader) {
  auto go = std::make_shared<std::promise<void>>();
  auto done = std::make_shared<std::promise<void>>();
  start_with([wait = go->get_future().share(), done]() -> absl::StatusOr<std::unique_ptr<Generator>> {
    wait.wait();
    done->set_value();
    return invalid("too late");
  });
  EXPECT_EQ(get("/livez").status, 200);
  server_->shutdown();
  join();
  EXPECT_TRUE(result_.ok());
  EXPECT_TRUE(server_->loader_abandoned());
  go->set_value();
  done->get_future().wait();
}

TEST_F(ServerTest, ShutdownLetsTheRunningRequestFinish) {
  start();
  close_gate();
  Json body = user_says("hi");
  body["stream"] = true;
  TestClient client(server_->port());
  client.send(chat_request(body));
  ASSERT_TRUE(wait_started(1));
  script_->allow(1);
  EXPECT_THAT(client.read_until("Hel"), HasSubstr("200 OK"));
  server_->shutdown();
  while (get("/readyz").status != 503) {
  }
  EXPECT_EQ(get("/livez").status, 200);
  EXPECT_EQ(get("/health").code(), "draining");
  EXPECT_EQ(chat(user_says("late")).status, 503);
  open_gate();
  EXPECT_THAT(client.read_until("[DONE]"), HasSubstr("\"finish_reason\":\"stop\""));
  join();
  EXPECT_TRUE(result_.ok());
}

TEST_F(ServerTest, ShutdownTimeoutCutsWithAnError) {
  options_.shutdown_timeout = milliseconds(50);
  start();
  close_gate();
  Json body = user_says("hi");
  TestClient whole(server_->port()), stream(server_->port());
  whole.send(chat_request(body));
  ASSERT_TRUE(wait_started(1));
  body["stream"] = true;
  stream.send(chat_request(body));
  ASSERT_TRUE(wait_admitted(2));
  server_->shutdown();
  const TestReply reply = whole.read_reply();
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(reply.code(), "draining");
  EXPECT_EQ(stream.read_reply().status, 503);  // not begun, so a status as well
  open_gate();
  join();
  EXPECT_TRUE(result_.ok());
}

TEST_F(ServerTest, ShutdownTimeoutEndsABegunStreamWithAnErrorEvent) {
  options_.shutdown_timeout = milliseconds(50);
  start();
  close_gate();
  Json body = user_says("hi");
  body["stream"] = true;
  TestClient client(server_->port());
  client.send(chat_request(body));
  ASSERT_TRUE(wait_started(1));
  script_->allow(1);
  EXPECT_THAT(client.read_until("Hel"), HasSubstr("200 OK"));
  server_->shutdown();
  const std::string rest = client.read_until("\r\n0\r\n\r\n");
  EXPECT_THAT(rest, HasSubstr("event: error\ndata: {\"error\""));
  EXPECT_THAT(rest, testing::Not(HasSubstr("[DONE]")));
  open_gate();
  join();
  EXPECT_TRUE(result_.ok());
}

TEST_F(ServerTest, ListenErrorsNameTheFlag) {
  start();
  ServeOptions same = options_;
  same.port = server_->port();
  EXPECT_THAT(std::string(Server::listen(same, clock_).status().message()), HasSubstr("--port"));
  same.port = 70000;
  EXPECT_EQ(exit_code(Server::listen(same, clock_).status()), 2);
  same.port = 0;
  same.host = "no such host";
  EXPECT_THAT(std::string(Server::listen(same, clock_).status().message()), HasSubstr("--host"));
  same.host = "127.0.0.1";
  same.media.local_path = "/no/such/folder";
  EXPECT_THAT(std::string(Server::listen(same, clock_).status().message()), HasSubstr("--allowed-local-media-path"));
}

}  // namespace
}  // namespace parvl
