#include "parvl/comm/transfer/transfer_socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>

#include "parvl/base/file.h"
#include "parvl/base/text.h"

namespace parvl {
namespace {

constexpr int kBacklog = 128;

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
};

absl::StatusOr<Address> local_address(const std::string& name) {
  sockaddr_un out{};
  if (name.empty() || name.size() >= sizeof out.sun_path) return invalid("a socket's name of ", name.size(), " bytes");
  out.sun_family = AF_UNIX;
  std::memcpy(out.sun_path + 1, name.data(), name.size());  // a leading zero: the abstract namespace
  Address address;
  std::memcpy(&address.bytes, &out, sizeof out);
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

std::optional<uint16_t> parse_port(std::string_view text) {
  int port = 0;
  if (text.empty() || text.size() > 5) return std::nullopt;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    port = port * 10 + (c - '0');
  }
  if (port > std::numeric_limits<uint16_t>::max()) return std::nullopt;
  return htons(static_cast<uint16_t>(port));
}

absl::StatusOr<Address> tcp_address(const std::string& text) {
  const absl::Status wrong = invalid("no numeric address with a port: ", excerpt(text));
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return wrong;
  const auto port = parse_port(std::string_view(text).substr(colon + 1));
  std::string host = text.substr(0, colon);
  if (!port) return wrong;
  Address out;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = *port;
    if (::inet_pton(AF_INET6, host.substr(1, host.size() - 2).c_str(), &v6.sin6_addr) != 1) return wrong;
    std::memcpy(&out.bytes, &v6, sizeof v6);
    out.size = sizeof v6;
  } else {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = *port;
    if (::inet_pton(AF_INET, host.c_str(), &v4.sin_addr) != 1) return wrong;
    std::memcpy(&out.bytes, &v4, sizeof v4);
    out.size = sizeof v4;
  }
  return out;
}

FileDescriptor make_socket(const Address& address) {
  return FileDescriptor(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

void set_option(const FileDescriptor& socket, int level, int name, int value) {
  ::setsockopt(socket.get(), level, name, &value, sizeof value);
}

absl::StatusOr<FileDescriptor> listen_at(const Address& address, const std::string& name) {
  FileDescriptor socket = make_socket(address);
  if (address.bytes.ss_family != AF_UNIX) set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (!socket || ::bind(socket.get(), address.get(), address.size) != 0 || ::listen(socket.get(), kBacklog) != 0) {
    const int error = errno;
    const std::string what = absl::StrCat("listen at ", name, ": ", std::strerror(error));
    return error == EADDRINUSE ? absl::AlreadyExistsError(what) : absl::InternalError(what);
  }
  return socket;
}

absl::Status nobody(const std::string& name, int error) {
  return absl::UnavailableError(absl::StrCat("nobody answers at ", name, ": ", std::strerror(error)));
}

}  // namespace

std::string host_identity() {
  const auto boot = read_file("/proc/sys/kernel/random/boot_id", 100);
  char network[100] = {};
  if (!boot.ok() || ::readlink("/proc/self/ns/net", network, sizeof network - 1) < 0) return "";
  return boot->substr(0, boot->find('\n')) + " " + network;
}

absl::StatusOr<FileDescriptor> listen_local(const std::string& name) {
  PARVL_ASSIGN_OR_RETURN(const Address address, local_address(name));
  return listen_at(address, "@" + name);
}

absl::StatusOr<FileDescriptor> listen_tcp(const std::string& text) {
  PARVL_ASSIGN_OR_RETURN(const Address address, tcp_address(text));
  return listen_at(address, text);
}

int64_t port_of(const FileDescriptor& listener) {
  Address out;
  out.size = sizeof out.bytes;
  ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&out.bytes), &out.size);
  uint16_t port = 0;  // at the same place in both
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  std::memcpy(&port, reinterpret_cast<const char*>(&out.bytes) + offsetof(sockaddr_in, sin_port), sizeof port);
  return ntohs(port);
}

std::string join_address(const std::string& host, int64_t port) {
  const bool v6 = host.find(':') != std::string::npos && host.front() != '[';
  return absl::StrCat(v6 ? "[" : "", host, v6 ? "]" : "", ":", port);
}

int Deadline::left_ms() const {
  const int64_t left = end_ns - clock->now_ns();
  return static_cast<int>(std::clamp<int64_t>((left + 999'999) / 1'000'000, 0, std::numeric_limits<int>::max()));
}

Deadline deadline_after(const Clock& clock, double seconds) {
  constexpr double kYear = 365.0 * 86400;
  const double wait = seconds < kYear ? std::max(seconds, 0.0) : kYear;
  return {&clock, clock.now_ns() + static_cast<int64_t>(wait * 1e9)};
}

bool wait_for(const FileDescriptor& socket, short events, const Deadline& deadline) {
  for (;;) {
    pollfd waited{socket.get(), events, 0};
    const int left = deadline.left_ms();
    const int ready = ::poll(&waited, 1, left);
    if (ready > 0) return true;
    if (ready == 0 && left == 0) return false;
  }
}

// A full backlog makes a non-blocking connect fail instead of wait, so this one blocks, within the deadline.
absl::StatusOr<FileDescriptor> connect_local(const std::string& name, const Deadline& deadline) {
  PARVL_ASSIGN_OR_RETURN(const Address address, local_address(name));
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int64_t left = deadline.left_ms();
  if (left == 0) return absl::DeadlineExceededError("no time left to connect to @" + name);
  const timeval limit{left / 1000, left % 1000 * 1000};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  int done = -1;
  do {
    done = socket ? ::connect(socket.get(), address.get(), address.size) : -1;
  } while (done != 0 && errno == EINTR);
  if (done != 0) {
    if (errno == EAGAIN) return absl::DeadlineExceededError("@" + name + " takes no connection in time");
    return nobody("@" + name, errno);
  }
  return socket;
}

absl::StatusOr<FileDescriptor> connect_tcp(const std::string& text, const Deadline& deadline) {
  PARVL_ASSIGN_OR_RETURN(const Address address, tcp_address(text));
  FileDescriptor socket = make_socket(address);
  if (!socket) return nobody(text, errno);
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  if (::connect(socket.get(), address.get(), address.size) != 0) {
    if (errno != EINPROGRESS) return nobody(text, errno);
    if (!wait_for(socket, POLLOUT, deadline)) {
      return absl::DeadlineExceededError(text + " takes no connection in time");
    }
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return nobody(text, error);
  }
  return socket;
}

int64_t send_some(int socket, std::string_view bytes, const int* descriptor) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor != nullptr) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), descriptor, sizeof(int));
  }
  int64_t sent = 0;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

int64_t receive_some(int socket, void* into, size_t bytes, FileDescriptor* descriptor) {
  iovec part{into, bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor != nullptr) {  // without room for them, the system closes those that come
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
  int64_t received = 0;
  do {
    received = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0 || descriptor == nullptr) return received;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(head), sizeof fd);
    *descriptor = FileDescriptor(fd);
  }
  return received;
}

}  // namespace parvl
