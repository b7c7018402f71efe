#include "parvl/comm/transfer/transfer_link.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace parvl {
namespace {

constexpr size_t kMaxIdle = 4;     // connections to a source that nobody uses
constexpr int64_t kMaxHolds = 96;  // through one connection; a source allows 128
constexpr int64_t kWake = 0;

absl::Status gone(int error) {
  return absl::UnavailableError(absl::StrCat("the source has closed the connection",
                                             error == 0 ? "" : absl::StrCat(" (", std::strerror(error), ")")));
}

}  // namespace

absl::Status TransferLink::wait(short events, const Deadline& deadline) const {
  const int64_t silent_ns = clock_.now_ns() + silence_ns_;
  if (wait_for(socket_, events, {&clock_, std::min(deadline.end_ns, silent_ns)})) return absl::OkStatus();
  if (deadline.end_ns <= silent_ns) return absl::DeadlineExceededError("the time for the transfer is over");
  return absl::UnavailableError(absl::StrCat("the source has been silent for ", silence_ns_ / 1'000'000, " ms"));
}

absl::StatusOr<bool> TransferLink::flush() {
  while (!unsent_.empty()) {
    const int64_t sent = send_some(socket_.get(), unsent_);
    if (sent < 0 && errno != EAGAIN) return gone(errno);
    if (sent < 0) return false;
    unsent_.erase(0, static_cast<size_t>(sent));
  }
  return true;
}

absl::Status TransferLink::send(const TransferMessage& message, const Deadline& deadline) {
  const std::string bytes = encode_message(message);
  for (bool first = true;; first = false) {
    {
      std::lock_guard lock(write_mutex_);
      if (first) unsent_ += bytes;
      PARVL_ASSIGN_OR_RETURN(const bool all, flush());
      if (all) return absl::OkStatus();
    }
    PARVL_RETURN_IF_ERROR(wait(POLLOUT, deadline));
  }
}

void TransferLink::release(TransferId item, bool good) {
  std::lock_guard lock(write_mutex_);
  unsent_ += encode_message(TransferRelease{item, good});
  flush().IgnoreError();
}

absl::Status TransferLink::receive(void* into, size_t bytes, const Deadline& deadline, FileDescriptor* descriptor) {
  for (size_t done = 0; done < bytes;) {
    const int64_t got = receive_some(socket_.get(), static_cast<char*>(into) + done, bytes - done, descriptor);
    if (got == 0) return gone(0);
    if (got < 0 && errno != EAGAIN) return gone(errno);
    if (got < 0) {
      PARVL_RETURN_IF_ERROR(wait(POLLIN, deadline));
    } else {
      done += static_cast<size_t>(got);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TransferAnswer> TransferLink::receive_answer(const Deadline& deadline, FileDescriptor* descriptor) {
  std::string header(kTransferHeaderBytes, '\0');
  PARVL_RETURN_IF_ERROR(receive(header.data(), header.size(), deadline, descriptor));
  const absl::StatusOr<size_t> length = read_header(header);
  if (!length.ok()) return absl::DataLossError(length.status().message());
  std::string body(*length, '\0');
  PARVL_RETURN_IF_ERROR(receive(body.data(), body.size(), deadline, descriptor));
  const absl::StatusOr<TransferMessage> message = decode_message(header, body);
  const auto* const answer = message.ok() ? std::get_if<TransferAnswer>(&*message) : nullptr;
  if (answer == nullptr) return absl::DataLossError("the source has answered with something else");
  return *answer;
}

TransferPeers::TransferPeers(const TransferSinkOptions& given) : options(given) {}

absl::Status TransferPeers::start_watching() {
  epoll_ = FileDescriptor(::epoll_create1(EPOLL_CLOEXEC));
  wake_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWake;
  if (!epoll_ || !wake_ || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    return failed("cannot watch transfers: ", std::strerror(errno));
  }
  thread_ = std::thread([this] { watch(); });
  return absl::OkStatus();
}

TransferPeers::~TransferPeers() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  thread_.join();
}

void TransferPeers::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
}

// Sources that have gone, and their memory with them; and mappings that nobody has used for long, whose slab the source
// may have forgotten.
void TransferPeers::watch() {
  for (;;) {
    epoll_event events[16];
    int wait_ms = 0;
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
      wait_ms = has_mappings() ? deadline_after(*options.clock, options.forget_s / 2).left_ms() : -1;
    }
    const int count = ::epoll_wait(epoll_.get(), events, 16, wait_ms);
    std::lock_guard lock(mutex_);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == kWake) {
        uint64_t ignored = 0;
        [[maybe_unused]] const auto got = ::read(wake_.get(), &ignored, sizeof ignored);
        continue;
      }
      const auto found = watched_.find(static_cast<int64_t>(events[i].data.u64));
      const auto link = found == watched_.end() ? nullptr : found->second.lock();
      if (link) link->dead = true;
    }
    forget_dead();
    forget_unused(options.clock->now_ns());
  }
}

void TransferPeers::forget_dead() {
  std::erase_if(watched_, [](const auto& entry) { return entry.second.expired(); });
  for (auto& [key, peer] : peers_) {
    std::erase_if(peer.idle, [](const auto& link) { return link->dead.load(); });
    std::erase_if(peer.links, [](const auto& weak) {
      const auto link = weak.lock();
      return !link || link->dead;
    });
  }
  std::erase_if(peers_, [](const auto& entry) { return entry.second.links.empty(); });
}

void TransferPeers::forget_unused(int64_t now_ns) {
  const auto forget_ns = static_cast<int64_t>(options.forget_s * 1e9);
  for (auto& [key, peer] : peers_) {
    std::erase_if(peer.mappings, [&](const auto& entry) {
      return entry.second.memory.use_count() == 1 && now_ns - entry.second.used_ns >= forget_ns;
    });
  }
}

// The one that was used longest ago goes first.
void TransferPeers::forget_beyond_limit() {
  for (;;) {
    int64_t bytes = 0, oldest_ns = 0, slab = 0;
    Peer* from = nullptr;
    for (auto& [key, peer] : peers_) {
      for (const auto& [number, mapping] : peer.mappings) {
        bytes += mapping.memory->bytes();
        if (mapping.memory.use_count() > 1 || (from != nullptr && mapping.used_ns >= oldest_ns)) continue;
        from = &peer;
        oldest_ns = mapping.used_ns;
        slab = number;
      }
    }
    if (bytes <= options.max_mapped_bytes || from == nullptr) return;
    from->mappings.erase(slab);
  }
}

bool TransferPeers::has_mappings() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) { return !entry.second.mappings.empty(); });
}

absl::StatusOr<std::shared_ptr<TransferLink>> TransferPeers::connect(const Key& key, const Deadline& deadline) const {
  const bool local = key.lane == TransferLane::kSharedMemory;
  PARVL_ASSIGN_OR_RETURN(FileDescriptor socket,
                         local ? connect_local(key.address, deadline) : connect_tcp(key.address, deadline));
  auto link = std::make_shared<TransferLink>(std::move(socket), key.lane, *options.clock, options.silence_s);
  TransferHello hello;
  hello.lane = key.lane;
  hello.token = options.token;
  hello.source = key.source;
  hello.source_epoch = key.epoch;
  hello.reader = options.name;
  hello.reader_epoch = options.epoch;
  PARVL_RETURN_IF_ERROR(link->send(hello, deadline));
  PARVL_ASSIGN_OR_RETURN(const TransferAnswer answer, link->receive_answer(deadline, nullptr));
  if (answer.code != absl::StatusCode::kOk) return absl::Status(answer.code, answer.message);
  return link;
}

void TransferPeers::add(const Key& key, const std::shared_ptr<TransferLink>& link) {
  bool wakes = false;
  {
    std::lock_guard lock(mutex_);
    peers_[key].links.push_back(link);
    const int64_t id = next_watched_++;
    watched_.emplace(id, link);
    epoll_event event{};
    event.events = EPOLLRDHUP | EPOLLONESHOT;
    event.data.u64 = static_cast<uint64_t>(id);
    wakes = ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link->socket().get(), &event) == 0;
  }
  if (!wakes) link->dead = true;  // it serves this once
}

absl::StatusOr<TransferPeers::Lease> TransferPeers::take(const Key& key, bool fresh, const Deadline& deadline) {
  if (!fresh) {
    std::lock_guard lock(mutex_);
    const auto peer = peers_.find(key);
    if (peer != peers_.end()) {
      auto& idle = peer->second.idle;
      const auto usable = std::find_if(idle.begin(), idle.end(),
                                       [](const auto& link) { return !link->dead && link->holds < kMaxHolds; });
      if (usable != idle.end()) {
        Lease out{std::move(*usable), false};
        idle.erase(usable);
        return out;
      }
    }
  }
  PARVL_ASSIGN_OR_RETURN(std::shared_ptr<TransferLink> link, connect(key, deadline));
  add(key, link);
  return Lease{std::move(link), true};
}

void TransferPeers::give_back(const Key& key, std::shared_ptr<TransferLink> link) {
  std::lock_guard lock(mutex_);
  const auto peer = peers_.find(key);
  if (peer == peers_.end() || link->dead || peer->second.idle.size() >= kMaxIdle) return;
  peer->second.idle.push_back(std::move(link));
}

std::shared_ptr<SharedSlab> TransferPeers::find_mapping(const Key& key, int64_t slab) {
  std::lock_guard lock(mutex_);
  const auto peer = peers_.find(key);
  if (peer == peers_.end()) return nullptr;
  const auto found = peer->second.mappings.find(slab);
  if (found == peer->second.mappings.end()) return nullptr;
  found->second.used_ns = options.clock->now_ns();
  return found->second.memory;
}

void TransferPeers::keep_mapping(const Key& key, int64_t slab, std::shared_ptr<SharedSlab> mapping) {
  const int64_t now_ns = options.clock->now_ns();
  std::lock_guard lock(mutex_);
  const auto peer = peers_.find(key);
  if (peer == peers_.end()) return;  // its source has gone meanwhile
  const bool was_bare = !has_mappings();
  peer->second.mappings[slab] = {std::move(mapping), now_ns};
  forget_beyond_limit();
  if (was_bare) wake();
}

void TransferPeers::count(const std::function<void(TransferSinkCounters&)>& change) {
  std::lock_guard lock(mutex_);
  change(counters_);
}

TransferSinkCounters TransferPeers::counters() const {
  std::lock_guard lock(mutex_);
  TransferSinkCounters out = counters_;
  for (const auto& [key, peer] : peers_) {
    for (const auto& weak : peer.links) {
      if (const auto link = weak.lock()) out.views += link->holds;
    }
    for (const auto& [slab, mapping] : peer.mappings) out.mapped_bytes += mapping.memory->bytes();
  }
  return out;
}

}  // namespace parvl
