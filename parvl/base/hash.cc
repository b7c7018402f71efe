#include "parvl/base/hash.h"

#include <bit>
#include <cstring>

namespace parvl {
namespace {

constexpr uint64_t kPrime1 = 0x9e3779b185ebca87, kPrime2 = 0xc2b2ae3d27d4eb4f, kPrime3 = 0x165667b19e3779f9,
                   kPrime4 = 0x85ebca77c2b2ae63, kPrime5 = 0x27d4eb2f165667c5;

template <typename T>
T read(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

uint64_t round(uint64_t lane, uint64_t input) { return std::rotl(lane + input * kPrime2, 31) * kPrime1; }
uint64_t merge(uint64_t hash, uint64_t lane) { return (hash ^ round(0, lane)) * kPrime1 + kPrime4; }

}  // namespace

uint64_t hash64_bytes(const void* data, size_t bytes, uint64_t seed) {
  const auto* at = static_cast<const unsigned char*>(data);
  const unsigned char* const end = at + bytes;
  uint64_t hash = seed + kPrime5;
  if (bytes >= 32) {
    uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; end - at >= 32; at += 32) {
      for (int i = 0; i < 4; ++i) lanes[i] = round(lanes[i], read<uint64_t>(at + 8 * i));
    }
    hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
    for (const uint64_t lane : lanes) hash = merge(hash, lane);
  }
  hash += bytes;
  for (; end - at >= 8; at += 8) hash = std::rotl(hash ^ round(0, read<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  if (end - at >= 4) {
    hash = std::rotl(hash ^ read<uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4;
  }
  for (; at < end; ++at) hash = std::rotl(hash ^ *at * kPrime5, 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace parvl
