#include "parvl/serve/http_connection.h"

#include <absl/strings/ascii.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include <algorithm>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/write.hpp>
#include <exception>
#include <limits>
#include <utility>
#include <vector>

#include "parvl/base/log.h"
#include "parvl/base/text.h"
#include "parvl/serve/api_error.h"

namespace parvl {
namespace {

constexpr size_t kReadBytes = 64u << 10;
constexpr size_t kMaxRequestId = 128;
constexpr std::chrono::milliseconds kCancelAgain{10};
constexpr size_t kSmallBody = 64u << 10, kOrdinaryBody = 1u << 20;

bool usable_request_id(std::string_view id) {
  return !id.empty() && id.size() <= kMaxRequestId &&
         std::all_of(id.begin(), id.end(), [](unsigned char c) { return c > 0x20 && c < 0x7f; });
}

// What all bodies may come to for one of this size to be taken. Large ones leave an eighth to the rest, so that a few
// slow uploads do not turn every request away; small ones, which the number of connections bounds, are always taken.
size_t bodies_beside(size_t bytes, size_t limit) {
  if (bytes <= kSmallBody) return std::numeric_limits<size_t>::max();
  return bytes <= kOrdinaryBody ? limit : limit - limit / 8;
}

absl::Status body_too_large(size_t limit) {
  return api_error(413, absl::StrCat("the body has more than ", limit, " bytes, the limit of a request"),
                   "body_too_large");
}

absl::Status header_error(const boost::system::error_code& error, const HttpLimits& limits) {
  if (error == http::error::header_limit || error == http::error::buffer_overflow) {
    return api_error(431, absl::StrCat("the request's headers have more than ", limits.header_bytes, " bytes"),
                     "headers_too_large");
  }
  return api_error(400, "this is not a valid HTTP request: " + error.message(), "bad_request");
}

using Fields = http::request_header<>;

// The elements of a list that may stand in several lines, in lower case.
std::vector<std::string> list_of(const Fields& fields, http::field name) {
  std::vector<std::string> out;
  const auto [begin, end] = fields.equal_range(name);
  for (auto line = begin; line != end; ++line) {
    const auto value = line->value();
    for (const absl::string_view element : absl::StrSplit(absl::string_view(value.data(), value.size()), ',')) {
      out.push_back(absl::AsciiStrToLower(absl::StripAsciiWhitespace(element)));
    }
  }
  return out;
}

// RFC 9112, 6.3: where a body ends that is framed in a way we do not know, nobody can tell, and what is left of it must
// not be read as the next request.
absl::Status check_transfer(const Fields& fields) {
  const std::vector<std::string> codings = list_of(fields, http::field::transfer_encoding);
  if (codings.empty()) return absl::OkStatus();
  if (fields.version() < 11) {
    return api_error(400, "Transfer-Encoding belongs to HTTP/1.1; send Content-Length instead", "bad_request");
  }
  if (codings.back() != "chunked" || std::count(codings.begin(), codings.end(), "chunked") != 1) {
    return api_error(400,
                     absl::StrCat("Transfer-Encoding ", excerpt(absl::StrJoin(codings, ", ")),
                                  " does not tell where the body ends; send chunked, or Content-Length alone"),
                     "bad_request");
  }
  if (codings.size() == 1) return absl::OkStatus();
  return api_error(
      501, absl::StrCat("Transfer-Encoding ", excerpt(codings.front()), " is not known here; send chunked alone"),
      "unknown_encoding");
}

// Whether the body, if there is one, can be read as it will come.
absl::Status check_body_headers(const Fields& fields) {
  PARVL_RETURN_IF_ERROR(check_transfer(fields));
  for (const std::string& coding : list_of(fields, http::field::content_encoding)) {
    if (coding.empty() || coding == "identity") continue;
    return api_error(415,
                     absl::StrCat("Content-Encoding ", excerpt(coding), " is not known here; send the body as it is"),
                     "unknown_encoding");
  }
  for (const std::string& expectation : list_of(fields, http::field::expect)) {
    if (expectation == "100-continue" || fields.version() < 11) continue;
    return api_error(417, absl::StrCat("Expect ", excerpt(expectation), " is not known here; 100-continue is"),
                     "unknown_expectation");
  }
  return absl::OkStatus();
}

// The path of a request target: "/a" of "/a?b", and of "http://HOST/a", which clients send to a proxy.
std::string path_of(std::string_view target) {
  const size_t scheme = target.find("://");
  if (scheme != std::string_view::npos && scheme < target.find_first_of("/?")) {
    target.remove_prefix(std::min(target.size(), target.find_first_of("/?", scheme + 3)));
    if (!target.starts_with('/')) return "/";
  }
  return std::string(target.substr(0, target.find('?')));
}

struct Disarm {
  Deadline& deadline;
  ~Disarm() { deadline.disarm(); }
};

}  // namespace

void Deadline::arm(std::chrono::milliseconds limit, std::shared_ptr<void> keeper) {
  expired_ = false;
  wait(limit, std::move(keeper), ++round_);
}

void Deadline::wait(std::chrono::milliseconds limit, std::shared_ptr<void> keeper, uint64_t round) {
  timer_.expires_after(limit);
  timer_.async_wait([this, keeper = std::move(keeper), round](const boost::system::error_code& error) {
    if (error || round != round_) return;
    expired_ = true;
    boost::system::error_code ignored;
    socket_.cancel(ignored);
    // A read or write of many pieces may be between two of them, where there is nothing to cancel: once more, until
    // disarmed.
    wait(kCancelAgain, keeper, round);
  });
}

void Deadline::disarm() {
  ++round_;
  timer_.cancel();
}

HttpConnection::HttpConnection(HttpShared& shared, asio::ip::tcp::socket socket)
    : shared_(shared),
      socket_(std::move(socket)),
      deadline_(shared.io, socket_),
      body_total_(shared.io, socket_),
      buffer_(shared.limits.header_bytes + 2 * kReadBytes),
      wakeup_(std::make_shared<Wakeup>(shared.io)) {
  ++shared_.connections;
}

HttpConnection::~HttpConnection() {
  hold_body(0);
  --shared_.connections;
}

std::string_view HttpConnection::header(std::string_view name) const {
  const auto value = parser_->get()[beast::string_view(name.data(), name.size())];
  return {value.data(), value.size()};
}

LogFields HttpConnection::log_fields() const {
  LogFields fields = {{"request_id", request_id_}};
  if (trace_.has_value()) {
    fields.emplace_back("trace_id", trace_->trace_id);
    fields.emplace_back("parent_id", trace_->parent_id);
  }
  return fields;
}

asio::awaitable<void> HttpConnection::run() {
  const auto self = shared_from_this();
  for (;;) {
    const Next next = co_await read_request();
    if (next == Next::kClose) break;
    if (next == Next::kHandle) {
      co_await answer_request();
      co_await stop_watching();
    }
    shared_.handler.finished(*this, replied_status_);
    if (gone_ || !keep_alive_) break;
  }
  co_await linger();
}

// An exception of a library ends one request, not the server.
asio::awaitable<void> HttpConnection::answer_request() {
  absl::Status failure;
  try {
    co_await shared_.handler.handle(*this);
  } catch (const std::bad_alloc&) {
    failure = api_error(503, "out of memory for this request", "out_of_memory");
  } catch (const std::exception& e) {
    failure = failed("internal error: ", e.what());
  }
  if (failure.ok()) co_return;
  log_line(LogLevel::kWarning, absl::StrCat("a request failed: ", failure.message()), log_fields());
  keep_alive_ = false;
  if (replied_status_ == 0 && !gone_) co_await reply_error(failure);
}

void HttpConnection::start_request() {
  hold_body(0);
  parser_.emplace();
  parser_->header_limit(static_cast<std::uint32_t>(shared_.limits.header_bytes));
  parser_->body_limit(boost::none);  // ours is checked in read_body, after the key
  path_.clear();
  query_.clear();
  trace_.reset();
  request_id_ = shared_.handler.new_request_id();
  keep_alive_ = chunked_ = gone_ = watch_wanted_ = false;
  replied_status_ = 0;
}

absl::Status HttpConnection::take_header() {
  const auto target = parser_->get().target();
  path_ = path_of({target.data(), target.size()});
  if (const size_t mark = target.find('?'); mark != target.npos) query_ = std::string(target.substr(mark + 1));
  keep_alive_ = parser_->get().keep_alive();
  if (const std::string_view id = header("X-Request-Id"); usable_request_id(id)) request_id_ = std::string(id);
  trace_ = parse_traceparent(header("traceparent"));
  if (parser_->get().version() >= 11 && parser_->get().count(http::field::host) != 1) {
    return api_error(400, "an HTTP/1.1 request needs one Host header", "bad_request");
  }
  return shared_.handler.check(*this);
}

asio::awaitable<bool> HttpConnection::wait_for_bytes() {
  if (buffer_.size() > 0) co_return true;  // the client sent ahead
  deadline_.arm(shared_.limits.idle, shared_from_this());
  const auto [error, bytes] = co_await socket_.async_read_some(buffer_.prepare(kReadBytes), kAwait);
  deadline_.disarm();
  buffer_.commit(bytes);
  if (error) gone_ = true;
  co_return !error;
}

asio::awaitable<HttpConnection::Next> HttpConnection::read_request() {
  start_request();
  if (!co_await wait_for_bytes()) co_return Next::kClose;
  arrival_ = received_s_ = shared_.clock.now_seconds();
  deadline_.arm(shared_.limits.header, shared_from_this());
  const auto [error, bytes] = co_await http::async_read_header(socket_, buffer_, *parser_, kAwait);
  deadline_.disarm();
  if (error == http::error::end_of_stream || error == http::error::partial_message ||
      error == asio::error::connection_reset) {
    gone_ = true;
    co_return Next::kClose;
  }
  if (error && deadline_.expired()) {
    co_return co_await refuse(api_error(408, "the request's headers took too long", "timeout"));
  }
  if (error) co_return co_await refuse(header_error(error, shared_.limits));
  absl::Status status = take_header();
  if (absl::Status unreadable = check_body_headers(parser_->get()); !unreadable.ok()) {
    co_return co_await refuse(std::move(unreadable));
  }
  if (!status.ok()) {
    // An unread body would be taken for the next request.
    if (!parser_->is_done()) co_return co_await refuse(std::move(status));
    co_await reply_error(std::move(status));
    co_return Next::kAnswered;
  }
  co_return co_await read_body();
}

asio::awaitable<HttpConnection::Next> HttpConnection::refuse(absl::Status status) {
  keep_alive_ = false;
  co_await reply_error(std::move(status));
  co_return Next::kAnswered;
}

void HttpConnection::hold_body(size_t bytes) {
  shared_.body_bytes = shared_.body_bytes - held_body_ + bytes;
  held_body_ = bytes;
}

asio::awaitable<HttpConnection::Next> HttpConnection::read_body() {
  const HttpLimits& limits = shared_.limits;
  if (const auto length = parser_->content_length(); length && *length > limits.body_bytes) {
    co_return co_await refuse(body_too_large(limits.body_bytes));
  }
  if (!parser_->is_done() && beast::iequals(parser_->get()[http::field::expect], "100-continue")) {
    co_await write_all("HTTP/1.1 100 Continue\r\n\r\n");
  }
  body_total_.arm(limits.body_total, shared_from_this());
  const Disarm disarm{body_total_};
  while (!parser_->is_done()) {
    deadline_.arm(limits.body_pause, shared_from_this());
    const bool waits = buffer_.size() == 0;
    const auto [error, bytes] = co_await http::async_read_some(socket_, buffer_, *parser_, kAwait);
    deadline_.disarm();
    if (waits) received_s_ = shared_.clock.now_seconds();
    if ((error && deadline_.expired()) || body_total_.expired()) {
      body_total_.disarm();  // the refusal is not to be cancelled
      co_return co_await refuse(api_error(408, "the request's body took too long", "timeout"));
    }
    if (error == http::error::partial_message || error == asio::error::connection_reset) {
      gone_ = true;
      co_return Next::kClose;
    }
    if (error) {
      co_return co_await refuse(
          api_error(400, "the request's body is not valid HTTP: " + error.message(), "bad_request"));
    }
    hold_body(parser_->get().body().size());
    if (held_body_ > limits.body_bytes) co_return co_await refuse(body_too_large(limits.body_bytes));
    if (shared_.body_bytes > bodies_beside(held_body_, limits.bodies_in_flight_bytes)) {
      co_return co_await refuse(
          api_error(429, "the server holds as much request data as it may; try again later", "too_much_in_flight"));
    }
  }
  co_return Next::kHandle;
}

// After the last answer: takes what a client is still sending, since closing on unread bytes would destroy the answer
// on its way.
asio::awaitable<void> HttpConnection::linger() {
  boost::system::error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  if (gone_) co_return;
  deadline_.arm(shared_.limits.linger, shared_from_this());
  while (!deadline_.expired()) {
    buffer_.clear();
    const auto [error, bytes] = co_await socket_.async_read_some(buffer_.prepare(kReadBytes), kAwait);
    if (error) break;
  }
  deadline_.disarm();
}

void HttpConnection::watch() {
  watch_wanted_ = true;
  if (!watch_pending_) watch_more();
}

// Reads ahead, since only a read tells that the client has left; what comes is kept for the next request.
void HttpConnection::watch_more() {
  if (buffer_.size() >= kReadBytes) return;  // it is alive and eager; a failing write will tell
  watch_pending_ = true;
  auto handler = [self = shared_from_this()](const boost::system::error_code& error, size_t bytes) {
    self->watch_pending_ = false;
    self->buffer_.commit(bytes);
    if (!error && self->watch_wanted_) self->watch_more();
    if (error && error != asio::error::operation_aborted) self->gone_ = true;
    self->wakeup_->notify();
  };
  socket_.async_read_some(buffer_.prepare(4096), asio::bind_cancellation_slot(stop_watch_.slot(), std::move(handler)));
}

asio::awaitable<void> HttpConnection::stop_watching() {
  watch_wanted_ = false;
  stop_watch_.emit(asio::cancellation_type::terminal);
  while (watch_pending_) co_await wakeup_->wait();
}

}  // namespace parvl
