// HTTP requests to one server over connections that are kept and used again. Everything runs on the io_context's
// thread.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"
#include "parvl/serve/async.h"

namespace parvl {

// http://HOST[:PORT][/PATH]. The path's last "/v1" is dropped: requests name it.
struct HttpTarget {
  std::string host, port, path;
};
absl::StatusOr<HttpTarget> parse_target(const std::string& url);

struct HttpAnswer {
  int status = 0;       // 0: none came
  std::string body;     // where it was not streamed
  std::string failure;  // "" when the answer is whole; else "connect", "timeout" or "connection lost"
  std::string detail;
};

class HttpClient {
 public:
  struct Options {
    HttpTarget target;
    std::string api_key;     // "": none
    double timeout_s = 600;  // of one exchange, from connecting to the last byte
  };
  // Gets the bytes of a 200's body as they come. An error ends the exchange and closes the connection.
  using OnBody = std::function<absl::Status(std::string_view bytes)>;

  // `io` and `clock` must outlive it.
  HttpClient(asio::io_context& io, Options options, const Clock& clock);
  ~HttpClient();

  // Looks the host up, on the calling thread; before the first exchange.
  absl::Status resolve();
  // Sends a GET when `body` is empty, else a POST of JSON, and reads the answer to its end. Without `on_body`, and of
  // an answer that is no 200, the body is kept, up to a limit.
  asio::awaitable<HttpAnswer> exchange(std::string path, std::string body, OnBody on_body);
  // Cuts the exchanges under way; later ones fail at once.
  void cancel();

 private:
  struct Connection;
  std::unique_ptr<Connection> take_idle();
  asio::awaitable<boost::system::error_code> send(Connection& connection, std::string path, std::string body);
  asio::awaitable<bool> receive(Connection& connection, HttpAnswer& answer, const OnBody& on_body);

  asio::io_context& io_;
  Options options_;
  const Clock& clock_;
  asio::ip::tcp::resolver::results_type addresses_;
  std::vector<std::unique_ptr<Connection>> idle_;  // the one used last at the end
  std::unordered_set<Connection*> busy_;
  bool cancelled_ = false;
};

}  // namespace parvl
