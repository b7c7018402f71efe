#include "tests/unit/serve_client.h"

#include <absl/strings/ascii.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "parvl/base/check.h"

namespace parvl {

namespace {
std::string error_field(const Json& json, const char* field) {
  if (!json.is_object() || !json.contains("error") || !json["error"].contains(field)) return "";
  const Json& value = json["error"][field];
  return value.is_string() ? value.get<std::string>() : "";
}
}  // namespace

std::string TestReply::code() const { return error_field(json(), "code"); }
std::string TestReply::param() const { return error_field(json(), "param"); }
std::string TestReply::message() const { return error_field(json(), "message"); }

std::vector<std::string> TestReply::events() const {
  std::vector<std::string> out;
  std::string prefix;
  for (size_t at = 0; at < body.size();) {
    size_t end = body.find('\n', at);
    if (end == std::string::npos) end = body.size();
    const std::string line = body.substr(at, end - at);
    if (line.starts_with("event: ")) prefix = line.substr(7) + ":";
    if (line.starts_with("data: ")) out.push_back(std::exchange(prefix, "") + line.substr(6));
    at = end + 1;
  }
  return out;
}

TestClient::TestClient(int port) {
  fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval limit = {20, 0};  // a test that waits longer has failed
  ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  const int receive_bytes =
      64 << 10;  // so that a client that does not read is full soon, whatever the system's default
  ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof receive_bytes);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  PARVL_CHECK(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0,
              "cannot connect to the test server");
}

TestClient::~TestClient() { close(); }

void TestClient::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void TestClient::shut_down_sending() { ::shutdown(fd_, SHUT_WR); }

bool TestClient::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

bool TestClient::fill() {
  char bytes[16384];
  const ssize_t n = ::recv(fd_, bytes, sizeof bytes, 0);
  closed_ = n == 0 || (n < 0 && errno == ECONNRESET);
  if (n <= 0) return false;
  buffer_.append(bytes, static_cast<size_t>(n));
  return true;
}

bool TestClient::closed_by_server() {
  while (fill()) {
  }
  return closed_;
}

std::string TestClient::read_until(const std::string& marker) {
  size_t at;
  while ((at = buffer_.find(marker)) == std::string::npos) {
    if (!fill()) return std::exchange(buffer_, "");
  }
  std::string out = buffer_.substr(0, at + marker.size());
  buffer_.erase(0, out.size());
  return out;
}

TestReply TestClient::read_reply(bool head) {
  TestReply reply;
  const std::string header = read_until("\r\n\r\n");
  if (!header.starts_with("HTTP/1.1 ")) return reply;
  reply.status = std::atoi(header.c_str() + 9);
  if (reply.status == 100) return read_reply(head);
  for (size_t at = header.find("\r\n") + 2; at + 2 < header.size();) {
    const size_t end = header.find("\r\n", at), colon = header.find(": ", at);
    reply.headers[absl::AsciiStrToLower(header.substr(at, colon - at))] = header.substr(colon + 2, end - colon - 2);
    at = end + 2;
  }
  if (head) {
    reply.whole = true;
  } else if (reply.headers.contains("content-length")) {
    const size_t length = std::strtoul(reply.headers["content-length"].c_str(), nullptr, 10);
    while (buffer_.size() < length && fill()) {
    }
    reply.whole = buffer_.size() >= length;
    reply.body = buffer_.substr(0, length);
    buffer_.erase(0, length);
  } else if (reply.headers.contains("transfer-encoding")) {
    for (;;) {
      const std::string line = read_until("\r\n");
      const size_t length = std::strtoul(line.c_str(), nullptr, 16);
      while (buffer_.size() < length + 2 && fill()) {
      }
      if (!line.ends_with("\r\n") || buffer_.size() < length + 2) break;
      reply.body += buffer_.substr(0, length);
      buffer_.erase(0, length + 2);
      if (length == 0) {
        reply.whole = true;
        break;
      }
    }
  } else {
    while (fill()) {
    }
    reply.body = std::exchange(buffer_, "");
    reply.whole = true;
  }
  return reply;
}

std::string http_request(const std::string& method, const std::string& path, const std::string& body,
                         const std::string& headers) {
  return method + " " + path + " HTTP/1.1\r\nHost: test\r\n" + headers +
         (body.empty() && method != "POST" ? "" : "Content-Length: " + std::to_string(body.size()) + "\r\n") + "\r\n" +
         body;
}

std::string chat_request(const Json& body) { return http_request("POST", "/v1/chat/completions", body.dump()); }

Json user_says(const std::string& text) { return {{"messages", Json::array({{{"role", "user"}, {"content", text}}})}}; }

TestReply TestClient::get(const std::string& path, const std::string& headers) {
  send(http_request("GET", path, "", headers));
  return read_reply();
}

TestReply TestClient::post(const std::string& path, const std::string& body, const std::string& headers) {
  send(http_request("POST", path, body, headers));
  return read_reply();
}

TestReply TestClient::chat(const Json& body, const std::string& headers) {
  return post("/v1/chat/completions", body.dump(), headers);
}

}  // namespace parvl
