// Waiting, leaving and loading.
#include <absl/strings/escaping.h>
#include <absl/strings/str_split.h>

#include <new>

#include "parvl/base/log.h"
#include "parvl/serve/running_jobs.h"
#include "tests/unit/serve_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

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

TEST_F(ServerTest, ImagesThatNobodyCanEncodeAreRefusedAtOnceAndLeaveTheirTurnsToText) {
  start();
  const Image grey{8, 8, std::vector<uint8_t>(size_t{3} * 8 * 8, 90)};
  const std::string url = "data:image/png;base64," + absl::Base64Escape(encode_png(grey));
  Json image = user_says("");
  image["messages"][0]["content"] = Json::array({{{"type", "image_url"}, {"image_url", {{"url", url}}}}});
  const auto refuse = [&](const absl::Status& status) {
    std::lock_guard lock(script_->mutex);
    script_->images_refused = status;
  };
  EXPECT_EQ(chat(image).status, 200);
  close_gate();
  TestClient running(server_->port()), next(server_->port()), waiting(server_->port());
  running.send(chat_request(user_says("runs")));
  ASSERT_TRUE(wait_admitted(1));
  next.send(chat_request(user_says("is made ready beside it")));
  ASSERT_TRUE(wait_admitted(2));
  waiting.send(chat_request(image));
  ASSERT_TRUE(wait_admitted(3));
  refuse(absl::UnavailableError("no instance can take it"));
  const TestReply refused = chat(image);
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.code(), "no_healthy_instance");
  EXPECT_EQ(server_->admitted(), 3u) << "it has no place";
  open_gate();
  EXPECT_EQ(running.read_reply().status, 200);
  EXPECT_EQ(next.read_reply().status, 200);
  EXPECT_EQ(waiting.read_reply().status, 503) << "it was in the line, and its turn came too late";
  EXPECT_EQ(chat(user_says("text")).status, 200);
  refuse(absl::OkStatus());
  EXPECT_EQ(chat(image).status, 200);
  std::lock_guard lock(script_->mutex);
  EXPECT_EQ(script_->started, 5);
}

TEST_F(ServerTest, DisconnectCancelsWhatRuns) {
  start();
  {
    std::lock_guard lock(script_->mutex);
    script_->endless = true;
  }
  for (const auto& [stream, half] : std::vector<std::pair<bool, bool>>{{true, false}, {false, false}, {false, true}}) {
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
    if (half) {
      client.shut_down_sending();
    } else {
      client.close();
    }
    ASSERT_TRUE(wait_admitted(0));
    if (half) {
      EXPECT_EQ(client.read_reply().status, 0);
    }
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
  start_with([&, wait = go.get_future().share()]() -> absl::StatusOr<std::unique_ptr<Engine>> {
    wait.wait();
    return std::make_unique<FakeEngine>(script_, folder_.path(), 200);
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

TEST_F(ServerTest, AFailedGenerationIsSeenByTheProbesUntilOneSucceeds) {
  start();
  const auto fail_with = [this](const absl::Status& error) {
    std::lock_guard lock(script_->mutex);
    script_->fail_after = error.ok() ? -1 : 0;
    script_->error = error;
  };
  const auto expect_failed = [this] {
    for (const char* path : {"/health", "/readyz"}) {
      const TestReply reply = get(path);
      EXPECT_EQ(reply.status, 503) << path;
      EXPECT_EQ(reply.code(), "generation_failed");
      EXPECT_EQ(reply.message(), "the last generation failed: device lost");
    }
    EXPECT_EQ(get("/livez").status, 200);
    EXPECT_EQ(get("/v1/models").status, 200);
  };
  fail_with(invalid("no room"));  // the request's own fault
  EXPECT_EQ(chat(user_says("hi")).status, 400);
  EXPECT_EQ(get("/health").status, 200);
  fail_with(failed("device\nlost"));
  EXPECT_EQ(chat(user_says("hi")).status, 500);
  expect_failed();
  fail_with(invalid("no room"));  // says nothing about the device
  EXPECT_EQ(chat(user_says("hi")).status, 400);
  expect_failed();

  fail_with(absl::OkStatus());
  close_gate();
  TestClient leaves(server_->port());
  leaves.send(chat_request(user_says("hi")));
  ASSERT_TRUE(script_->wait_for([&] { return script_->started == 4; }));
  leaves.close();
  ASSERT_TRUE(wait_admitted(0));
  script_->allow(1);  // which its client does not take
  ASSERT_TRUE(script_->wait_for([&] { return script_->cancelled == 1; }));
  expect_failed();

  open_gate();
  EXPECT_EQ(chat(user_says("hi")).status, 200);
  EXPECT_EQ(get("/health").status, 200);
  EXPECT_EQ(get("/readyz").status, 200);
}

TEST_F(ServerTest, LoadFailureEndsRun) {
  start_with([]() -> absl::StatusOr<std::unique_ptr<Engine>> { return invalid("no config.json in models/tiny"); });
  join();
  EXPECT_EQ(exit_code(result_), 2);
  EXPECT_EQ(result_.message(), "no config.json in models/tiny");
}

TEST(RunningJobsTest, EndWithTheirRequestHoweverItEnds) {
  const TemporaryFolder folder;
  write_model_folder(folder.path());
  const auto script = std::make_shared<FakeScript>();
  script->endless = true;
  FakeEngine engine(script, folder.path(), 200);
  EngineRequest request;
  auto prompt = std::make_shared<Prompt>();
  prompt->ids = {1};
  request.prompt = std::move(prompt);
  request.on_token = [](const TokenEvent&) {};
  request.on_end = [](const absl::StatusOr<GenerateResult>&) {};
  const auto serve = [&] {
    RunningJobs jobs(engine, {});
    jobs.submit(request);
    EXPECT_TRUE(script->wait_for([&] { return script->started == 1; }));
    throw std::bad_alloc();
  };
  EXPECT_THROW(serve(), std::bad_alloc);
  EXPECT_TRUE(script->wait_for([&] { return script->cancelled == 1; }));
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

TEST_F(ServerTest, RequestsAreLoggedWithTheirIdAndTraceButNotTheirContent) {
  options_.log_requests = true;
  start();
  set_log_format(LogFormat::kJson);
  testing::internal::CaptureStderr();
  for (const char* probe : {"/livez", "/readyz", "/health", "/metrics"}) EXPECT_EQ(get(probe).status, 200);  // unlogged
  const std::string trace = "4bf92f3577b34da6a3ce929d0e0e4736";
  EXPECT_EQ(
      chat(user_says("SECRET"), "X-Request-Id: mine\r\ntraceparent: 00-" + trace + "-00f067aa0ba902b7-01\r\n").status,
      200);
  {
    std::lock_guard lock(script_->mutex);
    script_->fail_after = 0;
    script_->error = failed("device lost");
  }
  EXPECT_EQ(chat(user_says("SECRET"), "X-Request-Id: other\r\ntraceparent: nonsense\r\n").status, 500);
  stop();  // after it, nobody writes any more
  const std::string text = testing::internal::GetCapturedStderr();
  set_log_format(LogFormat::kText);
  EXPECT_THAT(text, testing::Not(HasSubstr("SECRET")));
  std::vector<Json> answered, failures;
  for (const std::string& row : std::vector<std::string>(absl::StrSplit(text, '\n', absl::SkipEmpty()))) {
    const Json line = Json::parse(row, nullptr, false);
    ASSERT_TRUE(line.is_object()) << row;
    if (line["message"] == "answered") answered.push_back(line);
    if (line["message"] == "a request failed: device lost") failures.push_back(line);
  }
  ASSERT_EQ(answered.size(), 2u) << text;
  EXPECT_EQ(answered[0]["request_id"], "mine");
  EXPECT_EQ(answered[0]["trace_id"], trace);
  EXPECT_EQ(answered[0]["parent_id"], "00f067aa0ba902b7");
  EXPECT_EQ(answered[0]["method"], "POST");
  EXPECT_EQ(answered[0]["path"], "/v1/chat/completions");
  EXPECT_EQ(answered[0]["status"], 200);
  EXPECT_GT(answered[0]["seconds"], 0);
  EXPECT_EQ(answered[1]["status"], 500);
  EXPECT_FALSE(answered[1].contains("trace_id"));
  ASSERT_EQ(failures.size(), 1u) << text;
  EXPECT_EQ(failures[0]["request_id"], "other");
  EXPECT_EQ(failures[0]["level"], "warning");
}

}  // namespace
}  // namespace parvl
