// Media by http URL, from a small web server in this process.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "parvl/serve/api_error.h"
#include "parvl/serve/media_fetch.h"

namespace parvl {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// Answers one connection after another with what the test says about a path, then closes. Listens on every address of
// this machine, so that a connection to a wrong one would be seen.
class WebServer {
 public:
  // Sends what it likes to `fd`; `head` is the request.
  using Handler = std::function<void(int fd, const std::string& head)>;

  WebServer() : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    socklen_t length = sizeof address;
    auto* plain = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(listener_, plain, length), 0);
    EXPECT_EQ(::listen(listener_, 16), 0);
    EXPECT_EQ(::getsockname(listener_, plain, &length), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~WebServer() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
  }

  void on(const std::string& path, Handler handler) { handlers_[path] = std::move(handler); }
  void on(const std::string& path, const std::string& answer) {
    on(path, [answer](int fd, const std::string&) { say(fd, answer); });
  }
  std::string url(const std::string& path, const std::string& host = "127.0.0.1") const {
    return "http://" + host + ":" + std::to_string(port_) + path;
  }
  int port() const { return port_; }
  int requests() const { return requests_; }

  static bool say(int fd, const std::string& bytes) {
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = ::send(fd, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
      if (n <= 0) return false;
      done += static_cast<size_t>(n);
    }
    return true;
  }
  static void wait_for_leaving(int fd) {
    char byte;
    while (::recv(fd, &byte, 1, 0) > 0) {
    }
  }

 private:
  void serve() {
    for (int fd; (fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0; ::close(fd)) {
      std::string head;
      char byte;
      while (!head.ends_with("\r\n\r\n") && ::recv(fd, &byte, 1, 0) == 1) head += byte;
      ++requests_;
      const size_t begin = head.find(' ') + 1;
      const auto found = handlers_.find(head.substr(begin, head.find(' ', begin) - begin));
      if (found == handlers_.end()) {
        say(fd, "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone");
      } else {
        found->second(fd, head);
      }
    }
  }

  const int listener_;
  int port_ = 0;
  std::atomic<int> requests_ = 0;
  std::map<std::string, Handler> handlers_;
  std::thread thread_;
};

std::string ok(const std::string& body) {
  return "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

std::string redirect(const std::string& to, int status = 302) {
  return "HTTP/1.1 " + std::to_string(status) + " Elsewhere\r\nLocation: " + to +
         "\r\nSet-Cookie: a=b\r\nContent-Length: 3\r\n\r\nabc";
}

class MediaFetchTest : public testing::Test {
 protected:
  MediaFetchTest() { policy_.fetch.private_hosts = {"127.0.0.1"}; }

  absl::StatusOr<std::string> fetch(const std::string& url) { return MediaFetcher(policy_).fetch(url, "image 2 of 3"); }
  // The HTTP status of the error, which must say `says`.
  void refuses(int http_status, const std::string& url, const std::string& says) {
    const absl::Status status = fetch(url).status();
    EXPECT_EQ(http_status_of(status), http_status) << url << " " << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("image 2 of 3"), HasSubstr(says)));
  }

  MediaPolicy policy_;
  WebServer server_;
};

TEST_F(MediaFetchTest, ABodyAsItIs) {
  const std::string bytes("a\0b\r\n\xff", 6);
  server_.on("/a.png?x=1", ok(bytes));
  server_.on("/until-closed", "HTTP/1.0 200 OK\r\n\r\n" + bytes);
  server_.on("/chunked", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n" + bytes + "\r\n0\r\n\r\n");
  for (const char* path : {"/a.png?x=1", "/a.png?x=1#part", "/until-closed", "/chunked"}) {
    const auto body = fetch(server_.url(path));
    ASSERT_TRUE(body.ok()) << path << body.status();
    EXPECT_EQ(*body, bytes) << path;
  }
  EXPECT_EQ(*fetch("HTTP" + server_.url("/chunked").substr(4)), bytes);
}

TEST_F(MediaFetchTest, SendsNothingOfItsOwnAndUsesNoProxy) {
  std::string head;
  server_.on("/a", redirect("/b"));
  server_.on("/b", [&](int fd, const std::string& given) {
    head = given;
    WebServer::say(fd, ok("x"));
  });
  policy_.fetch.user_agent = "parvl/9.9";
  const std::string dead_proxy = "http://127.0.0.1:1";
  ASSERT_EQ(::setenv("http_proxy", dead_proxy.c_str(), 1), 0);
  ASSERT_EQ(::setenv("ALL_PROXY", dead_proxy.c_str(), 1), 0);
  ::unsetenv("no_proxy");  // which would hide the two
  ::unsetenv("NO_PROXY");
  EXPECT_TRUE(fetch(server_.url("/a")).ok());
  ::unsetenv("http_proxy");
  ::unsetenv("ALL_PROXY");
  EXPECT_THAT(head, AllOf(HasSubstr("User-Agent: parvl/9.9\r\n"), Not(HasSubstr("Cookie")), Not(HasSubstr("Auth"))));
}

TEST_F(MediaFetchTest, FollowsSoManyRedirects) {
  for (int i = 0; i < 6; ++i)
    server_.on("/" + std::to_string(i), redirect("/" + std::to_string(i + 1), 302 + i % 2 * 5));
  server_.on("/6", ok("here"));
  server_.on("/absolute", redirect(server_.url("/5"), 301));
  server_.on("/loop", redirect("/loop"));
  server_.on("/unmoved", "HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n");
  EXPECT_EQ(*fetch(server_.url("/1")), "here");
  EXPECT_EQ(*fetch(server_.url("/absolute")), "here");
  refuses(422, server_.url("/0"), "redirected more than 5 times");
  const int before = server_.requests();
  refuses(422, server_.url("/loop"), "redirected more than 5 times");
  EXPECT_EQ(server_.requests() - before, 6);
  refuses(422, server_.url("/unmoved"), "status 302");
}

TEST_F(MediaFetchTest, EveryHopIsChecked) {
  server_.on("/other-loopback", redirect(server_.url("/secret", "127.0.0.2")));
  server_.on("/decimal", redirect(server_.url("/secret", "2130706434")));  // 127.0.0.2
  server_.on("/mapped", redirect(server_.url("/secret", "[::ffff:127.0.0.1]")));
  server_.on("/localhost", redirect(server_.url("/secret", "localhost")));
  server_.on("/nowhere", redirect(server_.url("/secret", "0.0.0.0")));
  server_.on("/secret", ok("secret"));
  for (const char* path : {"/other-loopback", "/decimal", "/mapped", "/localhost", "/nowhere"}) {
    const int before = server_.requests();
    refuses(400, server_.url(path), "redirected");
    refuses(400, server_.url(path), "--allowed-private-media-hosts");
    EXPECT_EQ(server_.requests() - before, 2) << path;  // and none for the second hop
  }
  server_.on("/file", redirect("file:///etc/passwd"));
  server_.on("/ftp", redirect("ftp://127.0.0.1/x"));
  server_.on("/script", redirect("javascript:alert(1)"));
  server_.on("/user", redirect("http://example:secret@127.0.0.1/"));
  refuses(400, server_.url("/file"), "'file'; http and https are fetched");
  refuses(400, server_.url("/ftp"), "'ftp'; http and https are fetched");
  refuses(400, server_.url("/script"), "redirected, has a URL that is not valid");
  refuses(400, server_.url("/user"), "user name");
}

TEST_F(MediaFetchTest, PrivateHostsMustBeNamed) {
  server_.on("/a", ok("x"));
  policy_.fetch.private_hosts = {};
  refuses(400, server_.url("/a"),
          "'127.0.0.1', whose address is not public; --allowed-private-media-hosts can allow it");
  refuses(400, server_.url("/a", "localhost"), "--allowed-private-media-hosts");
  EXPECT_EQ(server_.requests(), 0);
  policy_.fetch.private_hosts = {"localhost"};
  EXPECT_TRUE(fetch(server_.url("/a", "LocalHost")).ok());
  refuses(400, server_.url("/a"), "--allowed-private-media-hosts");
  const std::string metadata = fetch("http://169.254.169.254/latest").status().ToString();
  EXPECT_THAT(metadata, HasSubstr("--allowed-private-media-hosts"));
}

TEST_F(MediaFetchTest, OnlyTheDomainsThatAreGiven) {
  server_.on("/a", ok("x"));
  server_.on("/away", redirect(server_.url("/a", "127.0.0.1")));
  policy_.fetch.private_hosts = {"localhost", "127.0.0.1"};
  policy_.fetch.domains = {"localhost", "images.test"};
  EXPECT_TRUE(fetch(server_.url("/a", "LOCALHOST")).ok());
  refuses(400, server_.url("/a"), "'127.0.0.1', which is not one of --allowed-media-domains");
  refuses(400, server_.url("/away", "localhost"), "'127.0.0.1', which is not one of --allowed-media-domains");
  for (const char* host : {"sub.images.test", "images.test.example.com", "ximages.test", "mages.test"}) {
    refuses(400, server_.url("/a", host), "--allowed-media-domains");
  }
  EXPECT_EQ(server_.requests(), 2);
}

TEST_F(MediaFetchTest, UrlsThatAreNotFetched) {
  const std::string here = server_.url("/");
  refuses(400, "http://example@" + here.substr(7), "user name or password");
  refuses(400, "http://example:secret@" + here.substr(7), "user name or password");
  refuses(400, "ftp://127.0.0.1/a", "'ftp'");
  refuses(400, "file:///etc/passwd", "'file'");
  refuses(400, "http://", "not valid");
  refuses(400, "http://127.0.0.1:99999/", "not valid");
  refuses(400, here + std::string("\0x", 2), "not valid");
  refuses(400, here + "a\r\nHost: x", "not valid");
  refuses(400, here + std::string(9000, 'x'), "8192 bytes");
  EXPECT_EQ(server_.requests(), 0);
  EXPECT_THAT(std::string(fetch("http://example:secret@127.0.0.1/").status().message()), Not(HasSubstr("secret")));
}

TEST_F(MediaFetchTest, WhatCannotBeFetched) {
  server_.on("/empty", ok(""));
  server_.on("/partial", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf");
  server_.on("/silent", "");
  server_.on("/nonsense", "220 mail.test ESMTP\r\n");
  server_.on("/failed", "HTTP/1.1 500 Sorry\r\nContent-Length: 6\r\n\r\nsecret");
  refuses(422, server_.url("/missing"), "from '127.0.0.1': the answer was status 404");
  refuses(422, server_.url("/failed"), "status 500");
  refuses(422, server_.url("/empty"), "empty");
  for (const char* path : {"/partial", "/silent", "/nonsense"}) refuses(422, server_.url(path), "cannot be fetched");
  refuses(422, "http://no-such-host.invalid/a", "'no-such-host.invalid': the host is not known");
  int dead_port = 0;
  {
    const WebServer gone;
    dead_port = gone.port();
  }
  refuses(422, "http://127.0.0.1:" + std::to_string(dead_port) + "/", "takes no connection");
}

TEST_F(MediaFetchTest, BodiesAreBounded) {
  policy_.image.max_bytes = 1000;
  std::atomic<bool> endless_ended = false;
  server_.on("/exact", ok(std::string(1000, 'x')));
  server_.on("/announced", ok(std::string(1001, 'x')));
  server_.on("/until-closed", "HTTP/1.0 200 OK\r\n\r\n" + std::string(1001, 'x'));
  server_.on("/endless", [&](int fd, const std::string&) {
    WebServer::say(fd, "HTTP/1.0 200 OK\r\n\r\n");
    while (WebServer::say(fd, std::string(4096, 'x'))) {
    }
    endless_ended = true;
  });
  server_.on("/endless-error", [](int fd, const std::string&) {
    WebServer::say(fd, "HTTP/1.0 404 Not Found\r\n\r\n");
    while (WebServer::say(fd, std::string(4096, 'x'))) {
    }
  });
  EXPECT_EQ(fetch(server_.url("/exact"))->size(), 1000u);
  for (const char* path : {"/announced", "/until-closed", "/endless"}) refuses(413, server_.url(path), "1000 bytes");
  refuses(422, server_.url("/endless-error"), "status 404");
  EXPECT_TRUE(endless_ended);  // it was over before the server took the next connection
}

TEST_F(MediaFetchTest, TimeIsBounded) {
  server_.on("/slow", [](int fd, const std::string&) {
    WebServer::say(fd, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome");
    WebServer::wait_for_leaving(fd);
  });
  server_.on("/never", [](int fd, const std::string&) { WebServer::wait_for_leaving(fd); });
  server_.on("/fast", ok("x"));
  policy_.fetch.item_time = milliseconds(300);
  refuses(422, server_.url("/slow"), "too long");
  refuses(422, server_.url("/never"), "too long");
  policy_.fetch.request_time = milliseconds(400);  // one item and no second one
  MediaFetcher fetcher(policy_);
  EXPECT_TRUE(fetcher.fetch(server_.url("/fast"), "x").ok());
  EXPECT_EQ(http_status_of(fetcher.fetch(server_.url("/slow"), "x").status()), 422);
  EXPECT_EQ(http_status_of(fetcher.fetch(server_.url("/never"), "x").status()), 422);
  const int before = server_.requests();
  EXPECT_EQ(http_status_of(fetcher.fetch(server_.url("/fast"), "x").status()), 422);
  EXPECT_EQ(server_.requests(), before);
}

TEST_F(MediaFetchTest, AStopEndsIt) {
  std::promise<void> asked;
  server_.on("/never", [&](int fd, const std::string&) {
    asked.set_value();
    WebServer::wait_for_leaving(fd);
  });
  policy_.fetch.item_time = policy_.fetch.request_time = std::chrono::hours(1);
  std::stop_source stop;
  auto ended = std::async(std::launch::async, [&] {
    MediaFetcher fetcher(policy_, stop.get_token());
    return fetcher.fetch(server_.url("/never"), "x").status();
  });
  asked.get_future().wait();
  stop.request_stop();
  EXPECT_EQ(http_status_of(ended.get()), 503);
  EXPECT_EQ(http_status_of(MediaFetcher(policy_, stop.get_token()).fetch(server_.url("/never"), "x").status()), 503);
}

}  // namespace
}  // namespace parvl
