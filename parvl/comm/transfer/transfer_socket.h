// Sockets and descriptors, owned; waits that end at a time of the clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "parvl/base/clock.h"
#include "parvl/base/file_descriptor.h"
#include "parvl/base/status.h"

namespace parvl {

// Two processes of one identity reach each other's abstract sockets: the machine's boot and the network namespace.
std::string host_identity();

// Both non-blocking. A local name lies in the abstract namespace, so it leaves no file. A TCP address is numeric:
// "10.0.0.3:0", "[::1]:4711"; port 0: a free one.
absl::StatusOr<FileDescriptor> listen_local(const std::string& name);
absl::StatusOr<FileDescriptor> listen_tcp(const std::string& address);
int64_t port_of(const FileDescriptor& listener);
// "10.0.0.3" and 4711 → "10.0.0.3:4711", with brackets where IPv6 needs them.
std::string join_address(const std::string& host, int64_t port);

struct Deadline {
  const Clock* clock;
  int64_t end_ns;
  // For poll and epoll: rounded up, at least 0.
  int left_ms() const;
};

// A time that is no number, or too long to wait for, is a year.
Deadline deadline_after(const Clock& clock, double seconds);

// Non-blocking and connected. Unavailable: nobody is there; DeadlineExceeded.
absl::StatusOr<FileDescriptor> connect_local(const std::string& name, const Deadline& deadline);
absl::StatusOr<FileDescriptor> connect_tcp(const std::string& address, const Deadline& deadline);

// Until one of `events` (of poll) is there or the other side has gone; false at the deadline.
bool wait_for(const FileDescriptor& socket, short events, const Deadline& deadline);

// As send and recv, without signals and with a descriptor where `descriptor` is not null: what was moved, or -1
// (errno).
int64_t send_some(int socket, std::string_view bytes, const int* descriptor = nullptr);
int64_t receive_some(int socket, void* into, size_t bytes, FileDescriptor* descriptor = nullptr);

}  // namespace parvl
