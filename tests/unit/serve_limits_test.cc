// Every limit of the HTTP side, reached.
#include "parvl/base/file.h"
#include "parvl/media/sandbox.h"
#include "tests/unit/serve_fixture.h"

namespace parvl {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

class LimitsTest : public ServerTest {
 protected:
  LimitsTest() { max_model_len_ = 100'000; }
  std::unique_ptr<TestClient> client() { return std::make_unique<TestClient>(server_->port()); }
};

TEST_F(LimitsTest, LongHeadersAre431) {
  start();
  auto c = client();
  EXPECT_EQ(c->get("/livez", "X-Long: " + std::string(10'000, 'x') + "\r\n").status, 200);
  EXPECT_EQ(c->get("/livez", "X-Long: " + std::string(20'000, 'x') + "\r\n").status, 431);
  EXPECT_TRUE(c->closed_by_server());
}

TEST_F(LimitsTest, NoHttpIs400) {
  start();
  for (const char* text : {"hello\r\n\r\n", "GET / HTTP/9.9\r\n\r\n",
                           "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n"}) {
    auto c = client();
    c->send(text);
    const TestReply reply = c->read_reply();
    EXPECT_EQ(reply.status, 400) << text;
    EXPECT_EQ(reply.json()["error"]["type"], "invalid_request_error");
    EXPECT_TRUE(c->closed_by_server());
  }
}

TEST_F(LimitsTest, LargeBodyIs413ByItsAnnouncementAndByItsBytes) {
  options_.http.body_bytes = 100'000;
  start();
  auto announced = client();
  announced->send("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100001\r\n\r\n");
  const TestReply reply = announced->read_reply();
  EXPECT_EQ(reply.status, 413);
  EXPECT_EQ(reply.code(), "body_too_large");

  auto chunked = client();
  chunked->send("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (int i = 0; i < 20; ++i) chunked->send("2710\r\n" + std::string(10'000, 'x') + "\r\n");
  EXPECT_EQ(chunked->read_reply().status, 413);

  // A client that sends everything before it reads still gets the answer.
  auto stubborn = client();
  stubborn->send(http_request("POST", "/v1/chat/completions", std::string(5'000'000, 'x')));
  EXPECT_EQ(stubborn->read_reply().status, 413);

  auto fits = client();
  EXPECT_EQ(fits->chat(user_says(std::string(90'000, 'x'))).status, 200);
}

TEST_F(LimitsTest, ChunkedBodyAndExpectContinueWork) {
  start();
  const std::string body = user_says("hi").dump();
  auto c = client();
  c->send("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (const char byte : body) c->send(std::string("1\r\n") + byte + "\r\n");
  c->send("0\r\n\r\n");
  EXPECT_EQ(c->read_reply().status, 200);
  c->send("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: " +
          std::to_string(body.size()) + "\r\n\r\n");
  EXPECT_THAT(c->read_until("\r\n\r\n"), HasSubstr("100 Continue"));
  c->send(body);
  EXPECT_EQ(c->read_reply().status, 200);
}

TEST_F(LimitsTest, ManyBodiesAtOnceAre429) {
  options_.http.bodies_in_flight_bytes = 150'000;
  start();
  {
    std::lock_guard lock(script_->mutex);
    script_->allowed = 0;
  }
  auto first = client();
  first->send(chat_request(user_says(std::string(90'000, 'x'))));
  ASSERT_TRUE(script_->wait_for([&] { return script_->started == 1; }));
  const TestReply reply = client()->chat(user_says(std::string(90'000, 'x')));
  EXPECT_EQ(reply.status, 429);
  EXPECT_EQ(reply.code(), "too_much_in_flight");
  script_->allow(1 << 30);
  EXPECT_EQ(first->read_reply().status, 200);
  EXPECT_EQ(client()->chat(user_says(std::string(90'000, 'x'))).status, 200);  // given back
}

TEST_F(LimitsTest, SlowHeadersAre408) {
  options_.http.header = milliseconds(50);
  start();
  auto c = client();
  c->send("GET /livez HTT");
  EXPECT_EQ(c->read_reply().status, 408);
  EXPECT_TRUE(c->closed_by_server());
}

TEST_F(LimitsTest, SlowBodyIs408) {
  options_.http.body_pause = milliseconds(50);
  start();
  auto c = client();
  c->send("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n{");
  const TestReply reply = c->read_reply();
  EXPECT_EQ(reply.status, 408);
  EXPECT_THAT(reply.message(), HasSubstr("too long"));
}

TEST_F(LimitsTest, ABodyThatTricklesForeverIs408) {
  options_.http.body_total = milliseconds(100);
  options_.http.linger = milliseconds(50);
  start();
  auto c = client();
  c->send("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 50000000\r\n\r\n");
  std::thread trickle([&] {
    while (c->send("x")) {
    }
  });
  EXPECT_EQ(c->read_reply().status, 408);
  c->closed_by_server();
  trickle.join();
}

TEST_F(LimitsTest, IdleConnectionIsClosed) {
  options_.http.idle = milliseconds(50);
  start();
  auto c = client();
  EXPECT_EQ(c->get("/livez").status, 200);
  EXPECT_TRUE(c->closed_by_server());
}

TEST_F(LimitsTest, ConnectionsOverTheLimitGet503AtOnce) {
  options_.http.connections = 4;
  start();
  std::vector<std::unique_ptr<TestClient>> kept;
  for (int tries = 0; kept.size() < 4 && tries < 1000; ++tries) {  // earlier ones may still be closing
    auto c = client();
    if (c->get("/livez").status == 200) kept.push_back(std::move(c));
  }
  ASSERT_EQ(kept.size(), 4u);
  auto c = client();
  const TestReply reply = c->read_reply();
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(reply.code(), "too_many_connections");
  EXPECT_TRUE(reply.whole);
  EXPECT_EQ(kept[0]->get("/livez").status, 200);
  kept.clear();
  int status = 0;
  for (int tries = 0; status != 200 && tries < 1000; ++tries) status = client()->get("/livez").status;
  EXPECT_EQ(status, 200);
}

TEST_F(LimitsTest, AClientThatDoesNotReadIsCutAndItsGenerationCancelled) {
  options_.http.write = milliseconds(100);
  start();
  {
    std::lock_guard lock(script_->mutex);
    script_->endless = true;
    script_->pieces = {std::string(100'000, 'y')};
    script_->allowed = 0;
  }
  Json body = user_says("hi");
  body["stream"] = true;
  auto c = client();
  c->send(chat_request(body));
  ASSERT_TRUE(script_->wait_for([&] { return script_->started == 1; }));
  script_->allow(200);  // 20 MB: more than both sockets' buffers hold
  ASSERT_TRUE(script_->wait_for([&] { return script_->allowed == 0 || script_->cancelled == 1; }));
  ASSERT_TRUE(wait_admitted(0));  // the write timed out, and the request is over
  script_->allow(1);
  EXPECT_TRUE(script_->wait_for([&] { return script_->cancelled == 1; }));
}

// Bytes of every kind at every cut: the server answers or closes, and lives.
TEST_F(LimitsTest, RandomAndTruncatedRequestsNeverHurtOthers) {
  options_.http.header = milliseconds(30);
  options_.http.body_pause = milliseconds(30);
  start();
  const std::string whole = chat_request(user_says("hi"));
  for (size_t cut = 1; cut < whole.size(); cut += 7) {
    auto c = client();
    c->send(whole.substr(0, cut));
    if (cut % 2)
      c->close();
    else
      c->shut_down_sending();
  }
  EXPECT_EQ(client()->chat(user_says("hi")).status, 200);
}

// A body of more than a few kilobytes goes through the chat template elsewhere, whatever part of it is large. This
// template takes long for one text, not for those that are rendered while the model loads: the server answers others
// meanwhile.
TEST_F(LimitsTest, WhatMayTakeLongKeepsNobodyWaiting) {
  const std::string path = folder_.path() + "/chat_template.jinja";
#if defined(PARVL_ADDRESS_SANITIZER)
  constexpr int kRounds = 2500;  // as long as ten times as many without it
#else
  constexpr int kRounds = 25000;
#endif
  const std::string slow = absl::StrCat("{% if messages[0]['content'] == 'slow' %}{% for i in range(", kRounds,
                                        ") %}{% if i == -1 %}x{% endif %}{% endfor %}{% endif %}");
  ASSERT_TRUE(write_file_atomically(path, slow + *read_file(path)).ok());
  start();
  Json body = user_says("slow");
  body["metadata"] = {{"note", std::string(4000, 'x')}};
  auto slow_one = client(), other = client();
  slow_one->send(chat_request(body));
  ASSERT_TRUE(wait_admitted(1));
  EXPECT_EQ(other->get("/livez").status, 200);
  {
    std::lock_guard lock(script_->mutex);
    EXPECT_EQ(script_->started, 0);
  }
  EXPECT_EQ(slow_one->read_reply().status, 200);
}

}  // namespace
}  // namespace parvl
