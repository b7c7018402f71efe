// How a request says where its body ends and how it is coded, and what many bodies at once may hold.
#include "tests/unit/serve_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

class FramingTest : public ServerTest {
 protected:
  FramingTest() { max_model_len_ = 100'000; }

  static std::string head(const std::string& headers) {
    return "POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\n" + headers + "\r\n";
  }
  static std::string length(const std::string& body) {
    return "Content-Length: " + std::to_string(body.size()) + "\r\n";
  }
};

// What follows such a header must never be read as a request of its own.
TEST_F(FramingTest, ABodyWhoseEndIsUnknownEndsTheConnection) {
  start();
  const std::string body = user_says("hi").dump(), smuggled = "GET /version HTTP/1.1\r\nHost: t\r\n\r\n";
  const std::pair<std::string, int> cases[] = {{"Transfer-Encoding: identity\r\n", 400},
                                               {"Transfer-Encoding: xchunked\r\n", 400},
                                               {"Transfer-Encoding: chunked, gzip\r\n", 400},
                                               {"Transfer-Encoding: chunked, chunked\r\n", 400},
                                               {"Transfer-Encoding: gzip, chunked\r\n", 501},
                                               {"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", 501},
                                               {"Transfer-Encoding: identity\r\n" + length(body), 400},
                                               {"Content-Encoding: gzip\r\n" + length(body), 415},
                                               {"Content-Encoding: identity, br\r\n" + length(body), 415},
                                               {"Expect: 200-foo\r\n" + length(body), 417}};
  for (const auto& [headers, status] : cases) {
    TestClient client(server_->port());
    client.send(head(headers) + smuggled + body);
    const TestReply reply = client.read_reply();
    EXPECT_EQ(reply.status, status) << headers;
    EXPECT_EQ(reply.headers.at("connection"), "close");
    EXPECT_EQ(client.read_reply().status, 0) << headers;
    EXPECT_TRUE(client.closed_by_server());
  }
  TestClient client(server_->port());
  client.send(head("Content-Encoding: gzip\r\n" + length(body)));
  EXPECT_THAT(client.read_reply().message(), HasSubstr("Content-Encoding 'gzip' is not known here"));
}

TEST_F(FramingTest, WhatIsKnownIsReadInAnySpelling) {
  start();
  const std::string body = user_says("hi").dump();
  TestClient client(server_->port());
  client.send(head("Transfer-Encoding: Chunked\r\nContent-Encoding: identity\r\n"));
  for (const char byte : body) client.send(std::string("1\r\n") + byte + "\r\n");
  client.send("0\r\n\r\n");
  EXPECT_EQ(client.read_reply().status, 200);
  client.send("POST /v1/chat/completions HTTP/1.0\r\nExpect: 200-foo\r\n" + length(body) + "\r\n" + body);
  EXPECT_EQ(client.read_reply().status, 200);  // HTTP/1.0 knows no expectations
}

// Uploads that stop halfway hold what they sent; only other large bodies are turned away for it.
TEST_F(FramingTest, HalfUploadsLeaveRoomForOrdinaryRequests) {
  options_.http.bodies_in_flight_bytes = 8 << 20;
  start();
  const auto half_of = [&](size_t bytes) {
    auto client = std::make_unique<TestClient>(server_->port());
    client->send(head("Content-Length: 50000000\r\n") + std::string(bytes, ' '));
    return client;
  };
  const auto turned_away = [&](size_t bytes) {  // once what was sent before has been read
    TestReply reply;
    for (int tries = 0; reply.status != 429 && tries < 1000; ++tries) reply = chat(user_says(std::string(bytes, 'x')));
    return reply.code();
  };
  const auto large = half_of(6 << 20);
  EXPECT_EQ(turned_away(3 << 20), "too_much_in_flight");
  EXPECT_EQ(chat(user_says(std::string(90'000, 'x'))).status, 200);
  const auto ordinary = half_of(1 << 20), another = half_of(1 << 20);
  EXPECT_EQ(turned_away(900'000), "too_much_in_flight");
  EXPECT_EQ(chat(user_says("hi")).status, 200);
}

}  // namespace
}  // namespace parvl
