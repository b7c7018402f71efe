#include "parvl/serve/server.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/detached.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "parvl/base/log.h"
#include "parvl/serve/admin.h"
#include "parvl/serve/api_error.h"
#include "parvl/serve/gateway.h"
#include "parvl/serve/http_connection.h"
#include "parvl/serve/media_source.h"

namespace parvl {
namespace {

using asio::ip::tcp;
using std::chrono::milliseconds;

constexpr rlim_t kOtherDescriptors = 256;
constexpr milliseconds kAcceptPause{100};  // after a failed accept (no free descriptor, say)
constexpr milliseconds kLastWords{1000};   // for requests that were cut to say so; at most half of the time-out
constexpr milliseconds kLastFlush{50};     // for answers under way once nothing is left to do

// Where clients come in: one for the API, and one for operators.
struct Listener {
  HttpShared shared;
  const char* limit_name;  // what raises the limit of connections
  std::optional<tcp::acceptor> acceptor = std::nullopt;
};

// Answers a connection that is one too many, without waiting for anything.
void turn_away(tcp::socket socket, const Listener& listener) {
  const std::string request_id = listener.shared.handler.new_request_id();
  const std::string body =
      error_body(api_error(503,
                           absl::StrCat("the server has ", listener.shared.limits.connections,
                                        " connections open, the most it takes", listener.limit_name),
                           kRefusalNames[static_cast<size_t>(Refusal::kTooManyConnections)]));
  const std::string reply = absl::StrCat("HTTP/1.1 503 Service Unavailable\r\nX-Request-Id: ", request_id,
                                         "\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: application/json",
                                         "\r\nContent-Length: ", body.size(), "\r\n\r\n", body);
  boost::system::error_code ignored;
  socket.non_blocking(true, ignored);
  socket.write_some(asio::buffer(reply), ignored);
  socket.shutdown(tcp::socket::shutdown_send, ignored);
}

// Descriptors for every connection, and for files, pipes and fetches beside them.
absl::Status allow_connections(size_t connections) {
  const rlim_t wanted = connections + kOtherDescriptors;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return absl::OkStatus();
  if (limit.rlim_max < wanted) {
    return invalid("--max-connections ", connections, " needs ", wanted, " open files, and this process may have ",
                   limit.rlim_max, "; lower it, or raise `ulimit -Hn`");
  }
  limit.rlim_cur = wanted;
  if (::setrlimit(RLIMIT_NOFILE, &limit) == 0) return absl::OkStatus();
  return failed("cannot raise the limit of open files to ", wanted, ": ", std::strerror(errno));
}

absl::Status check_options(const ServeOptions& options) {
  if (options.port < 0 || options.port > 65535)
    return invalid("--port must be between 0 and 65535, found ", options.port);
  if (options.max_queue < 0 || options.max_queue > 100'000) {
    return invalid("--max-queue must be between 0 and 100000, found ", options.max_queue);
  }
  if (options.max_queue_tokens < 0) {
    return invalid("--max-queue-tokens must be at least 0, found ", options.max_queue_tokens);
  }
  if (options.http.connections < 1 || options.http.connections > 1'000'000) {
    return invalid("--max-connections must be between 1 and 1000000, found ", options.http.connections);
  }
  if (options.served_names.empty()) return invalid("--served-model-name must name the model");
  for (const std::string& key : options.api_keys) {
    if (key.empty()) return invalid("--api-key must not be empty");
  }
  return absl::OkStatus();
}

struct FlagNames {
  std::string host, port;
};

absl::StatusOr<tcp::acceptor> open_acceptor(asio::io_context& io, const std::string& host, int port,
                                            const FlagNames& flags) {
  boost::system::error_code error;
  tcp::resolver resolver(io);
  const auto found =
      resolver.resolve(host, std::to_string(port), tcp::resolver::passive | tcp::resolver::numeric_service, error);
  if (error || found.empty())
    return invalid(flags.host, " ", host, " is no address of this machine: ", error.message());
  const tcp::endpoint endpoint = found.begin()->endpoint();
  tcp::acceptor acceptor(io);
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (!error) return acceptor;
  return failed("cannot listen on ", host, ":", port, ": ", error.message(), "; choose another ", flags.host, " or ",
                flags.port);
}

std::string url_of(const std::string& host, const tcp::acceptor& acceptor) {
  const bool v6 = host.find(':') != std::string::npos;
  return absl::StrCat("http://", v6 ? "[" + host + "]" : host, ":", acceptor.local_endpoint().port());
}

// Between the loader's thread and the io thread; outlives whichever is slower.
struct Loading {
  std::mutex mutex;
  bool orphaned = false;  // nobody waits for the model any more
  bool done = false;
  absl::StatusOr<std::unique_ptr<LoadedModel>> model = absl::UnknownError("not loaded");
};

}  // namespace

// The order of the last members matters: the io_context goes first, and takes the coroutines with it, whose connections
// and tickets still refer to what stands above.
struct Server::Impl {
  explicit Impl(ServeOptions given, const Clock& clock)
      : options(std::move(given)),
        io(std::make_unique<asio::io_context>(1)),
        gateway(*io, options, clock),
        api{{*io, options.http, gateway, clock}, " (--max-connections)"} {
    if (!options.admin.has_value()) return;
    admin = std::make_unique<Admin>(*io, gateway, clock);
    operators.emplace(Listener{{*io, admin_limits(), *admin, clock}, " of operators"});
  }

  ~Impl() {
    gateway.stop();
    stop_signal.reset();
    deadline.reset();
    api.acceptor.reset();
    if (operators.has_value()) operators->acceptor.reset();
    io.reset();
  }

  absl::Status listen();
  asio::awaitable<void> accept_loop(Listener& listener);
  void start_loading(const Loader& load, const std::function<void()>& on_ready);
  void loading_done(const std::function<void()>& on_ready);
  void watch_stop_descriptor();
  void begin_shutdown();
  void stop_after(milliseconds delay);

  ServeOptions options;
  std::unique_ptr<asio::io_context> io;
  Gateway gateway;
  std::unique_ptr<Admin> admin;
  Listener api;
  std::optional<Listener> operators;
  std::optional<asio::steady_timer> deadline;
  std::optional<asio::posix::stream_descriptor> stop_signal;
  std::shared_ptr<Loading> loading = std::make_shared<Loading>();
  std::thread loader;
  bool shutting_down = false;
  bool abandoned = false;
  absl::Status result;
};

absl::Status Server::Impl::listen() {
  PARVL_ASSIGN_OR_RETURN(api.acceptor, open_acceptor(*io, options.host, options.port, {"--host", "--port"}));
  if (!operators.has_value()) return absl::OkStatus();
  const AdminOptions& given = *options.admin;
  PARVL_ASSIGN_OR_RETURN(operators->acceptor,
                         open_acceptor(*io, given.host, given.port, {given.host_where, given.port_where}));
  if (!given.tokens.empty() || operators->acceptor->local_endpoint().address().is_loopback()) return absl::OkStatus();
  return invalid(given.host_where, ": ", given.host,
                 " can be reached from other machines; give admin.tokens, or leave it out");
}

asio::awaitable<void> Server::Impl::accept_loop(Listener& listener) {
  for (;;) {
    auto [error, socket] = co_await listener.acceptor->async_accept(kAwait);
    if (error == asio::error::operation_aborted) co_return;
    if (error) {
      log_warning("cannot accept a connection: ", error.message());
      asio::steady_timer pause(*io, kAcceptPause);
      co_await pause.async_wait(kAwait);
      continue;
    }
    if (listener.shared.connections >= listener.shared.limits.connections) {
      if (&listener == &api) gateway.metrics().refused(Refusal::kTooManyConnections);
      turn_away(std::move(socket), listener);
      continue;
    }
    boost::system::error_code ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    auto connection = std::make_shared<HttpConnection>(listener.shared, std::move(socket));
    asio::co_spawn(*io, connection->run(), asio::detached);
  }
}

void Server::Impl::start_loading(const Loader& load, const std::function<void()>& on_ready) {
  log_info("loading ", options.model_dir);
  loader = std::thread([this, load, on_ready, state = loading, max_images = options.media.max_images] {
    absl::StatusOr<std::unique_ptr<LoadedModel>> model = absl::UnknownError("not loaded");
    const absl::Status status = catch_exceptions("loading the model", [&]() -> absl::Status {
      PARVL_ASSIGN_OR_RETURN(auto engine, load());
      model = std::make_unique<LoadedModel>(std::move(engine), max_images);
      return absl::OkStatus();
    });
    if (!status.ok()) model = status;
    std::lock_guard lock(state->mutex);
    state->model = std::move(model);
    state->done = true;
    if (!state->orphaned) asio::post(*io, [this, on_ready] { loading_done(on_ready); });
  });
}

void Server::Impl::loading_done(const std::function<void()>& on_ready) {
  if (!loading->model.ok()) {
    result = loading->model.status();
    io->stop();
    return;
  }
  gateway.model_loaded(std::move(*loading->model));
  if (gateway.state() == Gateway::State::kReady) on_ready();
}

void Server::Impl::watch_stop_descriptor() {
  if (options.stop_descriptor < 0) return;
  stop_signal.emplace(*io, ::dup(options.stop_descriptor));
  stop_signal->async_wait(asio::posix::stream_descriptor::wait_read, [this](const boost::system::error_code& error) {
    if (!error) begin_shutdown();
  });
}

void Server::Impl::begin_shutdown() {
  if (std::exchange(shutting_down, true)) return;
  log_info("shutting down; requests still running: ", gateway.active());
  // Those that are cut say so within the time-out too.
  const milliseconds whole = options.shutdown_timeout, running = std::max(whole / 2, whole - kLastWords);
  deadline->expires_after(running);
  deadline->async_wait([this, left = whole - running](const boost::system::error_code& error) {
    if (error) return;
    log_warning("the time for running requests is over (--shutdown-timeout); requests cut: ", gateway.active());
    stop_after(std::max(left, kLastFlush));
    gateway.cut();
  });
  gateway.drain([this] { stop_after(kLastFlush); });
}

void Server::Impl::stop_after(milliseconds delay) {
  deadline->expires_after(delay);
  deadline->async_wait([this](const boost::system::error_code& error) {
    if (!error) io->stop();
  });
}

absl::StatusOr<std::unique_ptr<Server>> Server::listen(ServeOptions options, const Clock& clock) {
  PARVL_RETURN_IF_ERROR(check_options(options));
  PARVL_RETURN_IF_ERROR(allow_connections(options.http.connections));
  if (!options.media.local_path.empty()) {
    PARVL_ASSIGN_OR_RETURN(options.media.local_path, resolve_media_folder(options.media.local_path));
  }
  auto impl = std::make_unique<Impl>(std::move(options), clock);
  PARVL_RETURN_IF_ERROR(impl->listen());
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() = default;

int Server::port() const { return impl_->api.acceptor->local_endpoint().port(); }

std::string Server::url() const { return url_of(impl_->options.host, *impl_->api.acceptor); }

std::string Server::admin_url() const {
  return impl_->operators.has_value() ? url_of(impl_->options.admin->host, *impl_->operators->acceptor) : "";
}

absl::Status Server::run(const Loader& load, const std::function<void()>& on_ready) {
  Impl& impl = *impl_;
  impl.deadline.emplace(*impl.io);
  impl.watch_stop_descriptor();
  impl.start_loading(load, on_ready);
  asio::co_spawn(*impl.io, impl.accept_loop(impl.api), asio::detached);
  if (impl.operators.has_value()) {
    asio::co_spawn(*impl.io, impl.accept_loop(*impl.operators), asio::detached);
    asio::co_spawn(*impl.io, impl.admin->watch_fleet(), asio::detached);
  }
  impl.io->run();
  {
    std::lock_guard lock(impl.loading->mutex);
    impl.loading->orphaned = true;
    impl.abandoned = !impl.loading->done;
  }
  if (impl.abandoned) {
    impl.loader.detach();
  } else {
    impl.loader.join();
  }
  return impl.result;
}

void Server::shutdown() {
  asio::post(*impl_->io, [impl = impl_.get()] { impl->begin_shutdown(); });
}

size_t Server::admitted() const { return impl_->gateway.admission().size(); }

bool Server::loader_abandoned() const { return impl_->abandoned; }

}  // namespace parvl
