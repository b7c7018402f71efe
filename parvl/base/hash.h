// Fast hashes for finding differences; no protection against somebody who looks for equal ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace parvl {

// XXH64 of bytes. Pure; the same on every machine of this byte order (little-endian).
uint64_t hash64_bytes(const void* data, size_t bytes, uint64_t seed = 0);
inline uint64_t hash64(std::string_view text, uint64_t seed = 0) {
  return hash64_bytes(text.data(), text.size(), seed);
}

// One word out of two, every bit of which depends on every bit of both. mix64(a, b) is not mix64(b, a).
constexpr uint64_t mix64(uint64_t a, uint64_t b) {
  uint64_t h = (a ^ 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9;
  h = (h ^ (h >> 29) ^ b) * 0x94d049bb133111eb;
  h = (h ^ (h >> 32)) * 0xbf58476d1ce4e5b9;
  return h ^ (h >> 31);
}

}  // namespace parvl
