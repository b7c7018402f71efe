#include "parvl/comm/transfer/transfer_server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "parvl/base/check.h"

namespace parvl {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr uint64_t kWake = 0, kLocal = 1, kTcp = 2;
constexpr int kEvents = 64;
constexpr int kNames = 1000;  // of sockets that are tried
constexpr int64_t kListenPauseNs = 1'000'000'000;

int64_t to_ns(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

bool add_to(const FileDescriptor& epoll, const FileDescriptor& descriptor, uint64_t id, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  return ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, descriptor.get(), &event) == 0;
}

// A host that is switched off says nothing, so the system asks.
void keep_alive(const FileDescriptor& socket) {
  const auto set = [&socket](int level, int name, int value) {
    ::setsockopt(socket.get(), level, name, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

// Both directions closed by the other side, which for our sinks is the process's end or the last view's.
bool has_gone(const FileDescriptor& socket) {
  pollfd state{socket.get(), 0, 0};
  return ::poll(&state, 1, 0) > 0 && (state.revents & POLLHUP) != 0;
}

}  // namespace

TransferSourceState::TransferSourceState(const TransferSourceOptions& given)
    : options(given),
      wake_event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      host(host_identity()),
      ledger({given.arena_bytes, given.max_items}, absl::StrCat("parvl-", given.name, "-e", given.epoch)) {}

void TransferSourceState::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_event.get(), &one, sizeof one);
}

void TransferSourceState::changed() {
  if (ledger.take_freed()) {
    room.notify_all();
    if (starved && options.on_room) tell_room = true;
    starved = false;
  }
  if (tell_room || !to_close.empty() || ledger.next_expiry_ns(to_ns(options.patience_s)) < wakes_at_ns) wake();
}

TransferServer::TransferServer(std::shared_ptr<TransferSourceState> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<TransferServer>> TransferServer::start(std::shared_ptr<TransferSourceState> state) {
  const TransferSourceOptions& options = state->options;
  std::unique_ptr<TransferServer> out(new TransferServer(state));
  absl::StatusOr<FileDescriptor> local = absl::InternalError("");
  for (int i = 0; i < kNames && !local.ok(); ++i) {
    state->local_address = absl::StrCat("parvl/", options.name, "/e", options.epoch, "/", ::getpid(), ".", i);
    local = listen_local(state->local_address);
    if (!local.ok() && !absl::IsAlreadyExists(local.status())) return local.status();
  }
  PARVL_RETURN_IF_ERROR(local.status());
  out->local_ = std::move(*local);
  if (!options.tcp_listen.empty()) {
    PARVL_ASSIGN_OR_RETURN(out->tcp_, listen_tcp(options.tcp_listen));
    const std::string host =
        options.tcp_host.empty() ? options.tcp_listen.substr(0, options.tcp_listen.rfind(':')) : options.tcp_host;
    state->tcp_address = join_address(host, port_of(out->tcp_));
  }
  out->epoll_ = FileDescriptor(::epoll_create1(EPOLL_CLOEXEC));
  if (!out->epoll_ || !state->wake_event || !add_to(out->epoll_, state->wake_event, kWake, EPOLLIN)) {
    return failed("cannot wait for transfers: ", std::strerror(errno));
  }
  out->watch_listeners(true);
  out->thread_ = std::thread([server = out.get()] { server->run(); });
  return out;
}

TransferServer::~TransferServer() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->room.notify_all();
  }
  state_->wake();
  if (thread_.joinable()) thread_.join();
}

void TransferServer::watch_listeners(bool on) {
  listen_again_ns_ = on ? 0 : now() + kListenPauseNs;
  if (on) {
    add_to(epoll_, local_, kLocal, EPOLLIN);
    if (tcp_) add_to(epoll_, tcp_, kTcp, EPOLLIN);
  } else {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, local_.get(), nullptr);
    if (tcp_) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, tcp_.get(), nullptr);
  }
}

bool TransferServer::can_be_silent(const Connection& connection) const {
  return connection.greeted && !connection.leaving && !connection.sending;
}

bool TransferServer::is_silent(const Connection& connection, int64_t now_ns) const {
  return !can_be_silent(connection) && now_ns - connection.moved_ns >= to_ns(state_->options.silence_s);
}

// Until the next thing to do by itself; sets wakes_at_ns.
int TransferServer::wait_ms() {
  int64_t until = listen_again_ns_ > 0 ? listen_again_ns_ : kNever;
  for (const auto& [id, connection] : connections_) {
    if (!can_be_silent(connection)) until = std::min(until, connection.moved_ns + to_ns(state_->options.silence_s));
  }
  std::lock_guard lock(state_->mutex);
  until = std::min(until, state_->ledger.next_expiry_ns(to_ns(state_->options.patience_s)));
  state_->wakes_at_ns = until;
  if (until == kNever) return -1;
  return Deadline{state_->options.clock, until}.left_ms();
}

void TransferServer::run() {
  epoll_event events[kEvents];
  for (;;) {
    const int count = ::epoll_wait(epoll_.get(), events, kEvents, wait_ms());
    for (int i = 0; i < count; ++i) {
      const uint64_t what = events[i].data.u64;
      if (what == kWake) {
        uint64_t ignored = 0;
        [[maybe_unused]] const auto got = ::read(state_->wake_event.get(), &ignored, sizeof ignored);
      } else if (what == kLocal) {
        accept_from(local_, TransferLane::kSharedMemory);
      } else if (what == kTcp) {
        accept_from(tcp_, TransferLane::kTcp);
      } else {
        const ReaderId id{static_cast<int64_t>(what)};
        const auto found = connections_.find(id);  // one of this round may have ended another
        if (found != connections_.end()) serve(id, found->second);
      }
    }
    end_overdue();
    bool tell_room = false;
    {
      std::lock_guard lock(state_->mutex);
      if (state_->stopping) break;
      tell_room = std::exchange(state_->tell_room, false);
    }
    if (tell_room) state_->options.on_room();
  }
  while (!connections_.empty()) end(connections_.begin()->first, End::kMayStillRead);
}

void TransferServer::end_overdue() {
  const int64_t now_ns = now();
  if (listen_again_ns_ > 0 && listen_again_ns_ <= now_ns) watch_listeners(true);
  std::vector<ReaderId> closing, silent;
  {
    std::lock_guard lock(state_->mutex);
    closing = std::exchange(state_->to_close, {});
    const auto overdue = state_->ledger.expire(now_ns, to_ns(state_->options.patience_s));
    closing.insert(closing.end(), overdue.begin(), overdue.end());
    state_->changed();
  }
  for (const ReaderId id : closing) end(id, End::kMayStillRead);
  for (const auto& [id, connection] : connections_) {
    if (is_silent(connection, now_ns)) silent.push_back(id);
  }
  for (const ReaderId id : silent) {
    count(&TransferSourceCounters::silent);
    end(id, End::kMayStillRead);
  }
}

void TransferServer::count(int64_t TransferSourceCounters::*counter) {
  std::lock_guard lock(state_->mutex);
  ++(state_->ledger.counts().*counter);
}

// The one that has waited for longest without saying who it is makes place for another.
bool TransferServer::make_place() {
  if (static_cast<int64_t>(connections_.size()) < state_->options.max_connections) return true;
  const auto stranger = std::find_if(connections_.begin(), connections_.end(),
                                     [](const auto& connection) { return !connection.second.greeted; });
  count(&TransferSourceCounters::too_many);
  if (stranger == connections_.end()) return false;
  end(stranger->first, End::kMayStillRead);
  return true;
}

void TransferServer::accept_from(const FileDescriptor& listener, TransferLane lane) {
  FileDescriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    // Without descriptors it would be ready again at once, for ever.
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) watch_listeners(false);
    return;
  }
  if (!make_place()) return;
  if (lane == TransferLane::kTcp) keep_alive(socket);
  const ReaderId id{next_reader_++};
  Connection connection;
  connection.lane = lane;
  connection.moved_ns = now();
  connection.events = EPOLLIN | EPOLLRDHUP;
  if (!add_to(epoll_, socket, static_cast<uint64_t>(id.value), connection.events)) return;
  connection.socket = std::move(socket);
  connections_.emplace(id, std::move(connection));
  std::lock_guard lock(state_->mutex);
  ++state_->ledger.counts().connections;
}

void TransferServer::end(ReaderId id, End how) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  {
    std::lock_guard lock(state_->mutex);
    if (how == End::kMayStillRead) state_->ledger.cut_off(id);
    state_->ledger.leave(id);
    --state_->ledger.counts().connections;
    state_->changed();
  }
  connections_.erase(found);
  if (listen_again_ns_ > 0) watch_listeners(true);
}

// Something came, can be sent, or the other side has gone.
void TransferServer::serve(ReaderId id, Connection& connection) {
  absl::Status status = read_from(id, connection);
  if (status.ok()) status = write_to(connection);
  if (absl::IsUnavailable(status)) return end(id, has_gone(connection.socket) ? End::kGone : End::kMayStillRead);
  if (!status.ok()) {
    count(&TransferSourceCounters::malformed);
    return end(id, End::kMayStillRead);
  }
  if (connection.leaving && connection.out.empty()) return end(id, End::kMayStillRead);
  set_events(id, connection);
}

void TransferServer::set_events(ReaderId id, Connection& connection) {
  const auto& sending = connection.sending;
  const bool has_more = sending && sending->part < sending->hold.content->parts.size() && connection.credit > 0;
  const uint32_t events = EPOLLIN | EPOLLRDHUP | (has_more || !connection.out.empty() ? EPOLLOUT : 0u);
  if (events == connection.events) return;
  connection.events = events;
  epoll_event event{};
  event.events = events;
  event.data.u64 = static_cast<uint64_t>(id.value);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.socket.get(), &event);
}

}  // namespace parvl
