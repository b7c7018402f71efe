#include "parvl/serve/http_client.h"

#include <sys/socket.h>

#include <algorithm>
#include <boost/beast/core/error.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <cerrno>
#include <cmath>
#include <tuple>
#include <utility>

#include "parvl/base/text.h"

namespace parvl {
namespace {

namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;

constexpr double kIdleLimit_s = 4;           // servers close after 5 s and more
constexpr uint64_t kMaxKeptBody = 1u << 20;  // of an error, or of an answer that is not streamed
constexpr uint64_t kMaxStreamedBody = 1ull << 30;

// Whether the other side has closed an idle connection, or said something that nobody asked for.
bool is_stale(tcp::socket& socket) {
  char byte;
  return ::recv(socket.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EINTR);
}

void set_failure(HttpAnswer& answer, const char* kind, const error_code& error) {
  answer.failure = error == beast::error::timeout ? "timeout" : kind;
  answer.detail = error == beast::error::timeout          ? "no whole answer in the time of --timeout"
                  : error == http::error::end_of_stream   ? "the server closed the connection before it answered"
                  : error == http::error::partial_message ? "the server closed the connection within its answer"
                                                          : error.message();
}

}  // namespace

struct HttpClient::Connection {
  explicit Connection(asio::io_context& io) : stream(io) {}
  beast::tcp_stream stream;
  beast::flat_buffer buffer;
  double idle_since_s = 0;
};

absl::StatusOr<HttpTarget> parse_target(const std::string& url) {
  const auto refuse = [&] { return invalid("--target ", excerpt(url), " must be like http://127.0.0.1:8000"); };
  std::string_view rest = url;
  if (rest.starts_with("https://")) return not_available_yet("https in --target");
  if (!rest.starts_with("http://")) return refuse();
  rest.remove_prefix(7);
  HttpTarget target;
  const size_t slash = std::min(rest.find('/'), rest.size());
  target.path = rest.substr(slash);
  rest = rest.substr(0, slash);
  const size_t bracket = rest.starts_with('[') ? rest.find(']') : 0;  // [::1]:8000
  if (bracket == std::string_view::npos) return refuse();
  const size_t colon = std::min(rest.find(':', bracket), rest.size());
  target.host = bracket > 0 ? rest.substr(1, bracket - 1) : rest.substr(0, colon);
  target.port = colon < rest.size() ? rest.substr(colon + 1) : "80";
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto plain = [](char c) { return c > ' ' && c < 0x7f && c != '?' && c != '#' && c != '@'; };
  if (target.host.empty() || !std::all_of(url.begin(), url.end(), plain)) return refuse();
  if (target.port.empty() || target.port.size() > 5 || !std::all_of(target.port.begin(), target.port.end(), digit)) {
    return refuse();
  }
  while (target.path.ends_with('/')) target.path.pop_back();
  if (target.path.ends_with("/v1")) target.path.resize(target.path.size() - 3);
  return target;
}

HttpClient::HttpClient(asio::io_context& io, Options options, const Clock& clock)
    : io_(io), options_(std::move(options)), clock_(clock) {}
HttpClient::~HttpClient() = default;

absl::Status HttpClient::resolve() {
  error_code error;
  tcp::resolver resolver(io_);
  addresses_ = resolver.resolve(options_.target.host, options_.target.port, tcp::resolver::numeric_service, error);
  if (!error) return absl::OkStatus();
  return failed("the host ", excerpt(options_.target.host), " of --target cannot be looked up: ", error.message());
}

std::unique_ptr<HttpClient::Connection> HttpClient::take_idle() {
  while (!idle_.empty()) {
    auto connection = std::move(idle_.back());
    idle_.pop_back();
    const bool old = clock_.now_seconds() - connection->idle_since_s > kIdleLimit_s;
    if (!old && !is_stale(connection->stream.socket())) return connection;
    if (old) idle_.clear();  // those below it are older still
  }
  return nullptr;
}

asio::awaitable<HttpAnswer> HttpClient::exchange(std::string path, std::string body, OnBody on_body) {
  HttpAnswer answer;
  if (cancelled_) set_failure(answer, "connect", asio::error::operation_aborted);
  if (cancelled_) co_return answer;
  std::unique_ptr<Connection> connection = take_idle();
  const bool fresh = connection == nullptr;
  if (fresh) connection = std::make_unique<Connection>(io_);
  busy_.insert(connection.get());
  connection->stream.expires_after(std::chrono::nanoseconds(std::llround(options_.timeout_s * 1e9)));
  bool reusable = false;
  error_code error;
  if (fresh) {
    error = std::get<0>(co_await connection->stream.async_connect(addresses_, kAwait));
    if (error) set_failure(answer, "connect", error);
    error_code ignored;
    if (!error) connection->stream.socket().set_option(tcp::no_delay(true), ignored);
  }
  if (!error) {
    // A server that refuses may answer and close before it has read the body: its answer says more than our write's
    // error.
    const error_code unsent = co_await send(*connection, std::move(path), std::move(body));
    reusable = co_await receive(*connection, answer, on_body);
    if (unsent && answer.status == 0) set_failure(answer, "connection lost", unsent);
  }
  busy_.erase(connection.get());
  if (reusable && answer.failure.empty()) {
    connection->stream.expires_never();
    connection->idle_since_s = clock_.now_seconds();
    idle_.push_back(std::move(connection));
  }
  co_return answer;
}

asio::awaitable<error_code> HttpClient::send(Connection& connection, std::string path, std::string body) {
  http::request<http::string_body> request(body.empty() ? http::verb::get : http::verb::post,
                                           options_.target.path + path, 11);
  const std::string& host = options_.target.host;
  const bool v6 = host.find(':') != std::string::npos;
  request.set(http::field::host, (v6 ? "[" + host + "]" : host) + ":" + options_.target.port);
  if (!options_.api_key.empty()) request.set(http::field::authorization, "Bearer " + options_.api_key);
  if (!body.empty()) request.set(http::field::content_type, "application/json");
  request.body() = std::move(body);
  request.prepare_payload();
  const auto [error, bytes] = co_await http::async_write(connection.stream, request, kAwait);
  co_return error;
}

// Whether the connection may be used again.
asio::awaitable<bool> HttpClient::receive(Connection& connection, HttpAnswer& answer, const OnBody& on_body) {
  http::response_parser<http::string_body> parser;
  parser.body_limit(kMaxStreamedBody);
  auto [error, bytes] = co_await http::async_read_header(connection.stream, connection.buffer, parser, kAwait);
  if (error) {
    set_failure(answer, "connection lost", error);
    co_return false;
  }
  answer.status = parser.get().result_int();
  const bool streamed = answer.status == 200 && on_body != nullptr;
  while (!parser.is_done()) {
    std::tie(error, bytes) = co_await http::async_read_some(connection.stream, connection.buffer, parser, kAwait);
    std::string& body = parser.get().body();
    if (streamed && !body.empty()) {
      const absl::Status taken = on_body(body);
      body.clear();
      if (!taken.ok()) co_return false;
    }
    if (error || body.size() > kMaxKeptBody) {
      if (error) set_failure(answer, "connection lost", error);
      answer.body = std::move(body);
      co_return false;
    }
  }
  answer.body = std::move(parser.get().body());
  co_return parser.keep_alive();
}

void HttpClient::cancel() {
  cancelled_ = true;
  for (Connection* connection : busy_) connection->stream.close();  // what an exchange does next fails too
}

}  // namespace parvl
