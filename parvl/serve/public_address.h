// Which network addresses belong to the public internet.
#pragma once

#include <sys/socket.h>

namespace parvl {

// False for everything that a client must not reach through this server: this machine and its networks (loopback,
// private, shared, link-local, unique-local), multicast, addresses for documentation, tests and protocols, IPv6
// addresses that wrap an IPv4 one (mapped, 6to4, NAT64, Teredo), where clouds keep machines' credentials, and any
// family but IPv4 and IPv6. `address` must be as long as its family needs.
bool is_public_address(const sockaddr& address);

}  // namespace parvl
