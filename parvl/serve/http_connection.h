// One client's connection: reads requests within limits, hands each to the handler, writes its answer. One thread.
#pragma once

#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "parvl/base/clock.h"
#include "parvl/base/log.h"
#include "parvl/base/status.h"
#include "parvl/serve/async.h"
#include "parvl/serve/options.h"
#include "parvl/serve/trace_context.h"

namespace parvl {
namespace beast = boost::beast;
namespace http = boost::beast::http;

class HttpConnection;

// What answers requests.
class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  // Asked before the body is read: an error is the answer, and the body stays unread.
  virtual absl::Status check(const HttpConnection& connection) = 0;
  // Must answer exactly once: reply or reply_error, or begin_stream ... end_stream.
  virtual asio::awaitable<void> handle(HttpConnection& connection) = 0;
  virtual std::string new_request_id() = 0;
  // The value of the Allow header, for the paths that have one.
  virtual std::string allowed_methods(std::string_view path) const = 0;
  // Once a request is over, however it ended (also refused ones). `http_status` 0: the client left before an answer.
  virtual void finished(const HttpConnection& connection, int http_status) = 0;
};

// What all connections of a server share.
struct HttpShared {
  asio::io_context& io;
  HttpLimits limits;
  HttpHandler& handler;
  const Clock& clock;
  size_t connections = 0;
  size_t body_bytes = 0;  // of the bodies held now
};

// Cancels whatever the socket is doing from when the time is up until it is disarmed, and remembers that it was this.
class Deadline {
 public:
  Deadline(asio::io_context& io, asio::ip::tcp::socket& socket) : timer_(io), socket_(socket) {}
  // `keeper` owns the socket.
  void arm(std::chrono::milliseconds limit, std::shared_ptr<void> keeper);
  void disarm();
  bool expired() const { return expired_; }

 private:
  void wait(std::chrono::milliseconds limit, std::shared_ptr<void> keeper, uint64_t round);

  asio::steady_timer timer_;
  asio::ip::tcp::socket& socket_;
  uint64_t round_ = 0;  // a timer that fired while it was disarmed must not hit what comes after
  bool expired_ = false;
};

class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  using Headers = std::map<std::string, std::string>;

  HttpConnection(HttpShared& shared, asio::ip::tcp::socket socket);
  ~HttpConnection();

  // Serves requests until either side closes. The coroutine keeps the connection alive.
  asio::awaitable<void> run();

  // The request that is being answered.
  http::verb method() const { return parser_->get().method(); }
  std::string_view path() const { return path_; }
  std::string_view query() const { return query_; }      // what follows its '?'; "": nothing
  std::string_view header(std::string_view name) const;  // "" when absent
  // The body; it is gone from here afterwards, but still counted as held until the request is over.
  std::string take_body() { return std::move(parser_->get().body()); }
  const std::string& request_id() const { return request_id_; }
  int replied_status() const { return replied_status_; }  // 0: nothing yet
  double received_s() const { return received_s_; }  // when it was here; a byte that was waited for counts, a parse not
  double seconds() const { return shared_.clock.now_seconds() - arrival_; }  // since its first byte
  LogFields log_fields() const;  // what a log line about it says: its id, and the trace that it is a part of

  asio::awaitable<void> reply(int status, std::string body, Headers headers = {});  // JSON unless they say otherwise
  asio::awaitable<void> reply_error(absl::Status status, Headers headers = {});
  asio::awaitable<void> reply_methods();  // to OPTIONS
  void close_after_this() { keep_alive_ = false; }

  // Server-sent events: chunked, or to the end of the connection for HTTP/1.0. A stream that ends badly closes it too.
  // Its head goes out with the first events.
  void begin_stream();
  asio::awaitable<void> send(std::string events);
  asio::awaitable<void> end_stream(std::string events);

  // From now to the end of the request, gone() tells whether the client has left, and the wakeup is notified then.
  void watch();
  bool gone() const { return gone_; }
  const std::shared_ptr<Wakeup>& wakeup() { return wakeup_; }  // others may keep it longer than the connection lives

 private:
  // Reading (http_connection.cc).
  enum class Next { kClose, kAnswered, kHandle };  // what is to be done after reading a request
  asio::awaitable<Next> read_request();
  asio::awaitable<bool> wait_for_bytes();
  asio::awaitable<Next> read_body();
  asio::awaitable<Next> refuse(absl::Status status);  // closes after it
  asio::awaitable<void> answer_request();
  asio::awaitable<void> linger();
  void start_request();
  absl::Status take_header();
  void hold_body(size_t bytes);
  void watch_more();
  asio::awaitable<void> stop_watching();

  std::string chunk_of(const std::string& events);  // writing (http_reply.cc)
  asio::awaitable<void> write_all(std::string bytes);

  HttpShared& shared_;
  asio::ip::tcp::socket socket_;
  Deadline deadline_;    // of one read or write
  Deadline body_total_;  // of all reads of a body
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::string path_, query_, request_id_;
  std::optional<TraceContext> trace_;
  double arrival_ = 0, received_s_ = 0;
  size_t held_body_ = 0;
  bool keep_alive_ = false;
  bool chunked_ = false;
  std::string unsent_head_;  // of a stream
  int replied_status_ = 0;   // 0: not yet

  std::shared_ptr<Wakeup> wakeup_;
  asio::cancellation_signal stop_watch_;
  bool watch_wanted_ = false;
  bool watch_pending_ = false;  // a read is under way
  bool gone_ = false;
};

}  // namespace parvl
