// The writing half of HttpConnection.
#include <absl/strings/str_cat.h>

#include <boost/asio/write.hpp>
#include <utility>

#include "parvl/serve/api_error.h"
#include "parvl/serve/http_connection.h"

namespace parvl {
namespace {

std::string head(int status, bool keep_alive, const std::string& request_id, const HttpConnection::Headers& headers) {
  const auto reason = http::obsolete_reason(static_cast<http::status>(status));
  std::string text = absl::StrCat("HTTP/1.1 ", status, " ", std::string(reason.data(), reason.size()), "\r\n");
  absl::StrAppend(&text, "X-Request-Id: ", request_id, "\r\n");
  absl::StrAppend(&text, "Connection: ", keep_alive ? "keep-alive" : "close", "\r\n");
  for (const auto& [name, value] : headers) absl::StrAppend(&text, name, ": ", value, "\r\n");
  return text;
}

}  // namespace

asio::awaitable<void> HttpConnection::write_all(std::string bytes) {
  if (gone_) co_return;
  deadline_.arm(shared_.limits.write, shared_from_this());
  const auto [error, written] = co_await asio::async_write(socket_, asio::buffer(bytes), kAwait);
  deadline_.disarm();
  if (error) {
    gone_ = true;  // also a client that does not take what it asked for
    keep_alive_ = false;
  }
}

asio::awaitable<void> HttpConnection::reply(int status, std::string body, Headers headers) {
  replied_status_ = status;
  headers.emplace("Content-Type", "application/json");
  headers["Content-Length"] = std::to_string(body.size());
  std::string bytes = head(status, keep_alive_, request_id_, headers) + "\r\n";
  if (!parser_.has_value() || !parser_->is_header_done() || method() != http::verb::head) bytes += body;
  co_await write_all(std::move(bytes));
}

asio::awaitable<void> HttpConnection::reply_error(absl::Status status, Headers headers) {
  const int http_status = http_status_of(status);
  if (http_status == 429 || http_status == 503) headers.emplace("Retry-After", "1");
  if (http_status == 504) headers.emplace("X-Should-Retry", "false");  // it would take as long again
  if (http_status == 401) headers.emplace("WWW-Authenticate", "Bearer");
  if (http_status == 405) headers.emplace("Allow", shared_.handler.allowed_methods(path()));
  co_await reply(http_status, error_body(status), std::move(headers));
}

asio::awaitable<void> HttpConnection::reply_methods() {
  replied_status_ = 204;
  const Headers headers = {{"Allow", shared_.handler.allowed_methods(path())}};
  co_await write_all(head(204, keep_alive_, request_id_, headers) + "\r\n");
}

void HttpConnection::begin_stream() {
  replied_status_ = 200;
  chunked_ = parser_->get().version() >= 11;
  if (!chunked_) keep_alive_ = false;
  Headers headers = {{"Content-Type", "text/event-stream; charset=utf-8"}, {"Cache-Control", "no-cache"}};
  if (chunked_) headers["Transfer-Encoding"] = "chunked";
  unsent_head_ = head(200, keep_alive_, request_id_, headers) + "\r\n";
}

std::string HttpConnection::chunk_of(const std::string& events) {
  std::string out = std::exchange(unsent_head_, {});
  if (!chunked_ || events.empty()) return out + events;  // an empty chunk would be the end
  absl::StrAppend(&out, absl::Hex(events.size()), "\r\n", events, "\r\n");
  return out;
}

asio::awaitable<void> HttpConnection::send(std::string events) {
  std::string bytes = chunk_of(events);
  if (!bytes.empty()) co_await write_all(std::move(bytes));
}

asio::awaitable<void> HttpConnection::end_stream(std::string events) {
  std::string bytes = chunk_of(events);
  if (chunked_) bytes += "0\r\n\r\n";
  if (!bytes.empty()) co_await write_all(std::move(bytes));
}

}  // namespace parvl
