// Time-outs, queues and connections over a real socket: how each ends a request, once, and what it frees and counts.
#include <sys/resource.h>

#include <cstdlib>
#include <iostream>

#include "tests/unit/serve_fixture.h"

namespace parvl {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;

class TimeoutTest : public ServerTest {
 protected:
  std::unique_ptr<TestClient> client() { return std::make_unique<TestClient>(server_->port()); }
  std::unique_ptr<TestClient> send(const Json& body) {
    auto c = client();
    c->send(chat_request(body));
    return c;
  }
  void expect_refused(const std::string& reason, int count) {
    EXPECT_THAT(get("/metrics").body, HasSubstr("parvl_requests_refused_total{pool=\"colocated\",reason=\"" + reason +
                                                "\"} " + std::to_string(count) + "\n"));
  }
  // The engine hears of the cancellation with its next token.
  void expect_cancelled(int64_t count) {
    script_->allow(1);
    EXPECT_TRUE(script_->wait_for([&] { return script_->cancelled == count; }));
  }
};

TEST_F(TimeoutTest, ARequestThatTakesTooLongIs504AndFreesItsPlace) {
  options_.request_timeout = milliseconds(100);
  start();
  close_gate();
  for (const bool stream : {false, true}) {  // a stream that has not begun has a status too
    Json body = user_says("hi");
    body["stream"] = stream;
    const TestReply reply = send(body)->read_reply();
    EXPECT_EQ(reply.status, 504);
    EXPECT_EQ(reply.code(), "request_timeout");
    EXPECT_EQ(reply.json()["error"]["type"], "server_error");
    EXPECT_THAT(reply.message(), HasSubstr("0.1 s (--request-timeout)"));
    EXPECT_EQ(reply.headers.at("x-should-retry"), "false");
    EXPECT_FALSE(reply.headers.contains("retry-after"));
    ASSERT_TRUE(wait_admitted(0));
    expect_cancelled(1 + stream);
  }
  expect_refused("request_timeout", 2);
  expect_refused("queue_timeout", 0);
  EXPECT_EQ(get("/health").status, 200);
}

TEST_F(TimeoutTest, AStreamThatTakesTooLongEndsWithAnErrorEvent) {
  options_.request_timeout = milliseconds(200);
  start();
  close_gate();
  Json body = user_says("hi");
  body["stream"] = true;
  auto c = send(body);
  ASSERT_TRUE(wait_started(1));
  script_->allow(1);
  const TestReply reply = c->read_reply();
  EXPECT_EQ(reply.status, 200);
  EXPECT_TRUE(reply.whole);
  const std::vector<std::string> events = reply.events();
  ASSERT_FALSE(events.empty());
  EXPECT_THAT(events.back(), HasSubstr("error:{\"error\""));
  EXPECT_THAT(events.back(), HasSubstr("request_timeout"));
  EXPECT_THAT(reply.body, Not(HasSubstr("[DONE]")));
  ASSERT_TRUE(wait_admitted(0));
  expect_cancelled(1);
  expect_refused("request_timeout", 1);
}

TEST_F(TimeoutTest, ARequestThatGetsNoTurnIs503AndIsNeverRun) {
  options_.queue_timeout = milliseconds(100);
  start();
  close_gate();
  auto runs = send(user_says("runs")), ready = send(user_says("ready"));
  ASSERT_TRUE(wait_admitted(2));
  const TestReply reply = send(user_says("waits"))->read_reply();
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(reply.code(), "queue_timeout");
  EXPECT_THAT(reply.message(), HasSubstr("0.1 s for its turn"));
  EXPECT_TRUE(reply.headers.contains("retry-after"));
  ASSERT_TRUE(wait_admitted(2));
  open_gate();
  EXPECT_EQ(runs->read_reply().status, 200);  // who had a turn is not hurt by the time-out of the queue
  EXPECT_EQ(ready->read_reply().status, 200);
  EXPECT_EQ(script_->started, 2);
  expect_refused("queue_timeout", 1);
}

TEST_F(TimeoutTest, WhoWaitsIsAnsweredOnceNobodyIsLeftToTakeIt) {
  options_.queue_timeout = options_.request_timeout = milliseconds(0);
  start();
  close_gate();
  auto runs = send(user_says("runs")), ready = send(user_says("ready"));
  ASSERT_TRUE(wait_started(1));
  ASSERT_TRUE(wait_admitted(2));
  auto waits = send(user_says("waits"));
  ASSERT_TRUE(wait_admitted(3));
  const auto tell = [&](const absl::Status& gone) {
    std::function<void()> changed;
    {
      std::lock_guard lock(script_->mutex);
      script_->gone = gone;
      changed = script_->capacity_changed;
    }
    changed();
  };
  tell(absl::OkStatus());  // not so many instances, but some: it waits on
  tell(absl::UnavailableError("instance 1 is gone"));
  const TestReply reply = waits->read_reply();
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(reply.code(), "no_healthy_instance");
  EXPECT_THAT(reply.message(), HasSubstr("instance 1 is gone"));
  ASSERT_TRUE(wait_admitted(2));
  EXPECT_EQ(send(user_says("late"))->read_reply().status, 503) << "it finds nobody either";
  open_gate();
  EXPECT_EQ(runs->read_reply().status, 200) << "what has somewhere to run is done there";
  EXPECT_EQ(ready->read_reply().status, 200);
}

TEST_F(TimeoutTest, ZeroMeansWithoutEnd) {
  options_.queue_timeout = options_.request_timeout = milliseconds(0);
  start();
  close_gate();
  auto a = send(user_says("a")), b = send(user_says("b")), c = send(user_says("c"));
  ASSERT_TRUE(wait_admitted(3));
  open_gate();
  for (auto* one : {&a, &b, &c}) EXPECT_EQ((*one)->read_reply().status, 200);
}

// Whichever comes first: an end, a time-out, a client that leaves. Every generation ends once, every place comes back.
TEST_F(TimeoutTest, EveryRequestEndsOnceWhateverComesFirst) {
  options_.request_timeout = milliseconds(30);
  options_.queue_timeout = milliseconds(15);
  options_.max_queue = 8;
  start();
  int64_t answers = 0;
  std::map<int, int64_t> by_status;
  for (int round = 0; round < 20; ++round) {
    close_gate();
    std::vector<std::unique_ptr<TestClient>> clients;
    for (int i = 0; i < 12; ++i) {
      Json body = user_says("hi");
      body["stream"] = i % 2 == 0;
      clients.push_back(send(body));
      if (i % 5 == 4) clients.back()->close();
      script_->allow(i % 3);
    }
    for (size_t i = 0; i < clients.size(); ++i) {
      if (i % 5 == 4) continue;
      const TestReply reply = clients[i]->read_reply();
      EXPECT_TRUE(reply.whole) << reply.status;
      ++answers;
      ++by_status[reply.status];
    }
    open_gate();
    ASSERT_TRUE(wait_admitted(0));
  }
  EXPECT_EQ(answers, 20 * 10);
  for (const auto& [status, count] : by_status) {
    EXPECT_TRUE(status == 200 || status == 429 || status == 503 || status == 504) << status;
  }
  EXPECT_TRUE(script_->wait_for([&] { return script_->started == script_->ended; }));
  EXPECT_EQ(chat(user_says("hi")).status, 200);
  EXPECT_THAT(get("/metrics").body, HasSubstr("parvl_num_requests_waiting{pool=\"colocated\"} 0\n"));
}

TEST_F(TimeoutTest, TooManyPromptTokensAre429) {
  options_.max_queue_tokens = 60;
  start();
  close_gate();
  auto first = send(user_says("a"));
  ASSERT_TRUE(wait_started(1));
  const TestReply reply = send(user_says(std::string(50, 'x')))->read_reply();
  EXPECT_EQ(reply.status, 429);
  EXPECT_EQ(reply.code(), "too_many_tokens");
  EXPECT_THAT(reply.message(), HasSubstr("--max-queue-tokens"));
  EXPECT_TRUE(reply.headers.contains("retry-after"));
  open_gate();
  EXPECT_EQ(first->read_reply().status, 200);
  ASSERT_TRUE(wait_admitted(0));
  EXPECT_EQ(send(user_says(std::string(50, 'x')))->read_reply().status, 200);  // alone it may
  expect_refused("too_many_tokens", 1);
}

TEST_F(TimeoutTest, AFullQueueOfImagesLeavesTextItsPlaces) {
  options_.max_queue = 1;
  start();
  close_gate();
  const Json picture = Json::parse(
      R"({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]})");
  auto runs = send(user_says("runs")), ready = send(user_says("ready"));  // the one that waits of its kind
  ASSERT_TRUE(wait_admitted(2));
  auto waits = send(picture);
  ASSERT_TRUE(wait_admitted(3));
  const std::string metrics = get("/metrics").body;
  EXPECT_THAT(metrics, HasSubstr("parvl_queue_requests{pool=\"colocated\",queue=\"image\"} 1\n"));
  EXPECT_THAT(metrics, HasSubstr("parvl_queue_requests{pool=\"colocated\",queue=\"text\"} 1\n"));
  const TestReply second = send(picture)->read_reply();
  EXPECT_EQ(second.status, 429);  // before anything is decoded: the picture is none
  EXPECT_EQ(second.message(), "the queue is full: 1 image request waits (--max-queue)");
  EXPECT_EQ(chat(user_says("more")).message(), "the queue is full: 1 text request waits (--max-queue)");
  expect_refused("queue_full", 2);
  open_gate();
  EXPECT_EQ(runs->read_reply().status, 200);
  EXPECT_EQ(ready->read_reply().status, 200);
  EXPECT_EQ(waits->read_reply().status, 422);
}

TEST_F(TimeoutTest, ConnectionsOverTheLimitSayWhichFlag) {
  options_.http.connections = 1;
  start();
  auto kept = client();
  ASSERT_EQ(kept->get("/livez").status, 200);
  const TestReply reply = client()->read_reply();
  EXPECT_EQ(reply.status, 503);
  EXPECT_TRUE(reply.whole);
  EXPECT_EQ(reply.message(), "the server has 1 connections open, the most it takes (--max-connections)");
  EXPECT_TRUE(reply.headers.contains("x-request-id"));
  const std::string counter = "parvl_requests_refused_total{pool=\"colocated\",reason=\"too_many_connections\"} 1\n";
  EXPECT_THAT(kept->get("/metrics").body, HasSubstr(counter));
}

TEST_F(TimeoutTest, LimitsThatMakeNoSenseNameTheirFlag) {
  ServeOptions bad = options_;
  bad.http.connections = 0;
  EXPECT_THAT(std::string(Server::listen(bad, clock_).status().message()), HasSubstr("--max-connections"));
  bad = options_;
  bad.max_queue_tokens = -1;
  EXPECT_THAT(std::string(Server::listen(bad, clock_).status().message()), HasSubstr("--max-queue-tokens"));
}

// In a process of its own, which cannot take it back.
TEST_F(TimeoutTest, MoreConnectionsThanOpenFilesSayHowToHaveMore) {
  options_.http.connections = 1000;
  const auto listen = [this] {
    const rlimit few{300, 300};
    if (::setrlimit(RLIMIT_NOFILE, &few) != 0) std::_Exit(99);
    const absl::Status status = Server::listen(options_, clock_).status();
    std::cerr << status.message();
    std::_Exit(exit_code(status));
  };
  EXPECT_EXIT(listen(), testing::ExitedWithCode(2),
              "--max-connections 1000 needs 1256 open files, and this process may have 300; .*ulimit -Hn");
}

}  // namespace
}  // namespace parvl
