#include "parvl/media/worker_protocol.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

namespace parvl {
namespace {

absl::Status wait_for(int socket, short events, const Until& until) {
  int milliseconds = -1;
  if (until.clock != nullptr) {
    const int64_t left = (until.ns - until.clock->now_ns()) / 1'000'000;
    if (left <= 0) return absl::DeadlineExceededError("it took too long");
    milliseconds = static_cast<int>(std::min<int64_t>(left, std::numeric_limits<int>::max()));
  }
  pollfd wait{socket, events, 0};
  ::poll(&wait, 1, milliseconds);  // whatever it says, the call that follows tells
  return absl::OkStatus();
}

// Calls `move(offset)`, which gives the bytes it moved as send and recv do, until all are moved.
template <typename Move>
absl::Status move_all(int socket, short events, size_t bytes, const Until& until, Move move) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = move(done);
    if (n > 0) {
      done += static_cast<size_t>(n);
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
      PARVL_RETURN_IF_ERROR(wait_for(socket, events, until));
    } else {
      return absl::UnavailableError("the other side is gone");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status send_all(int socket, const void* data, size_t bytes, const Until& until) {
  const int flags = MSG_NOSIGNAL | (until.clock != nullptr ? MSG_DONTWAIT : 0);
  return move_all(socket, POLLOUT, bytes, until, [&](size_t done) {
    return ::send(socket, static_cast<const char*>(data) + done, bytes - done, flags);
  });
}

absl::Status receive_all(int socket, void* data, size_t bytes, const Until& until) {
  const int flags = until.clock != nullptr ? MSG_DONTWAIT : 0;
  return move_all(socket, POLLIN, bytes, until,
                  [&](size_t done) { return ::recv(socket, static_cast<char*>(data) + done, bytes - done, flags); });
}

absl::Status send_memory(int socket, const WorkerMemory& memory, int descriptor, const Until& until) {
  iovec content{const_cast<WorkerMemory*>(&memory), sizeof memory};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptor)] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  if (memory.bytes > 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  const int flags = MSG_NOSIGNAL | (until.clock != nullptr ? MSG_DONTWAIT : 0);
  size_t first = 0;
  PARVL_RETURN_IF_ERROR(move_all(socket, POLLOUT, 1, until, [&](size_t) {
    const ssize_t n = ::sendmsg(socket, &message, flags);
    first = n > 0 ? static_cast<size_t>(n) : 0;
    return n > 0 ? 1 : n;
  }));
  return send_all(socket, reinterpret_cast<const char*>(&memory) + first, sizeof memory - first, until);
}

absl::Status receive_memory(int socket, WorkerMemory& memory, int& descriptor) {
  descriptor = -1;
  iovec content{&memory, sizeof memory};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptor)] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  size_t first = 0;
  PARVL_RETURN_IF_ERROR(move_all(socket, POLLIN, 1, {}, [&](size_t) {
    const ssize_t n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    first = n > 0 ? static_cast<size_t>(n) : 0;
    return n > 0 ? 1 : n;
  }));
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof descriptor)) {
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
  }
  return receive_all(socket, reinterpret_cast<char*>(&memory) + first, sizeof memory - first, {});
}

}  // namespace parvl
