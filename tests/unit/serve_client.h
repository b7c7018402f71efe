// A small blocking HTTP client for tests, which can also misbehave: cut, wait, send bytes that are no HTTP.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/json.h"

namespace parvl {

struct TestReply {
  int status = 0;                              // 0: the server closed without an answer
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;                            // chunks joined
  bool whole = false;                          // the body came to its end
  Json json() const { return Json::parse(body, nullptr, false); }
  std::string code() const;   // error.code, or ""
  std::string param() const;  // error.param, or ""
  std::string message() const;
  // The events of a stream: each "data: ..." payload, with "error:" in front where the event is named so.
  std::vector<std::string> events() const;
};

class TestClient {
 public:
  explicit TestClient(int port);
  ~TestClient();
  TestClient(const TestClient&) = delete;
  TestClient& operator=(const TestClient&) = delete;

  bool send(std::string_view bytes);  // false when the server has closed
  TestReply read_reply(bool head = false);
  // Everything up to and including `marker`; what came so far when the server closes first.
  std::string read_until(const std::string& marker);
  bool closed_by_server();  // waits for it (at most 20 s)
  void shut_down_sending();
  void close();

  TestReply get(const std::string& path, const std::string& headers = "");
  TestReply post(const std::string& path, const std::string& body, const std::string& headers = "");
  TestReply chat(const Json& body, const std::string& headers = "");

 private:
  bool fill();  // more bytes into buffer_

  int fd_ = -1;
  bool closed_ = false;
  std::string buffer_;
};

std::string http_request(const std::string& method, const std::string& path, const std::string& body,
                         const std::string& headers = "");
std::string chat_request(const Json& body);
Json user_says(const std::string& text);  // {"messages": [...]}

}  // namespace parvl
