#include "parvl/serve/public_address.h"

#include <netinet/in.h>

#include <cstdint>
#include <cstring>

namespace parvl {
namespace {

// An address belongs to a block when its first `bits` bits are those of `first`.
template <typename Int>
struct Block {
  Int first;
  int bits;
  bool holds(Int address) const { return (address ^ first) >> (8 * static_cast<int>(sizeof(Int)) - bits) == 0; }
};

constexpr uint32_t v4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return a << 24 | b << 16 | c << 8 | d; }

constexpr Block<uint32_t> kNotPublic4[] = {
    {v4(0, 0, 0, 0), 8},         // "this" network; connects to this machine
    {v4(10, 0, 0, 0), 8},        // private
    {v4(100, 64, 0, 0), 10},     // shared, behind carriers' NAT
    {v4(127, 0, 0, 0), 8},       // loopback
    {v4(168, 63, 129, 16), 32},  // Azure's metadata, in the midst of public addresses
    {v4(169, 254, 0, 0), 16},    // link-local, and most clouds' metadata
    {v4(172, 16, 0, 0), 12},     // private
    {v4(192, 0, 0, 0), 24},      // protocols
    {v4(192, 0, 2, 0), 24},      // documentation
    {v4(192, 88, 99, 0), 24},    // 6to4 relays
    {v4(192, 168, 0, 0), 16},    // private
    {v4(198, 18, 0, 0), 15},     // benchmarks
    {v4(198, 51, 100, 0), 24},   // documentation
    {v4(203, 0, 113, 0), 24},    // documentation
    {v4(224, 0, 0, 0), 4},       // multicast
    {v4(240, 0, 0, 0), 4},       // reserved, and broadcast
};

// By the first half of an IPv6 address. Only this block is for the internet, and parts of it are not.
constexpr Block<uint64_t> kPublic6 = {0x2000'0000'0000'0000, 3};
constexpr Block<uint64_t> kNotPublic6[] = {
    {0x2001'0000'0000'0000, 23},  // protocols, Teredo
    {0x2001'0db8'0000'0000, 32},  // documentation
    {0x2002'0000'0000'0000, 16},  // 6to4, which wraps an IPv4 address
    {0x3fff'0000'0000'0000, 20},  // documentation
};

template <typename Int, size_t N>
bool any_holds(const Block<Int> (&blocks)[N], Int address) {
  for (const Block<Int>& block : blocks) {
    if (block.holds(address)) return true;
  }
  return false;
}

}  // namespace

bool is_public_address(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, &address, sizeof in);
    return !any_holds(kNotPublic4, static_cast<uint32_t>(ntohl(in.sin_addr.s_addr)));
  }
  if (address.sa_family == AF_INET6) {
    sockaddr_in6 in6;
    std::memcpy(&in6, &address, sizeof in6);
    uint64_t half = 0;
    for (int i = 0; i < 8; ++i) half = half << 8 | in6.sin6_addr.s6_addr[i];
    return kPublic6.holds(half) && !any_holds(kNotPublic6, half);
  }
  return false;
}

}  // namespace parvl
