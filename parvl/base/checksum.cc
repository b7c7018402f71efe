#include "parvl/base/checksum.h"

#include <algorithm>
#include <cstring>

#include "parvl/base/xxh3.h"

namespace parvl {

uint64_t piece_checksum(const void* data, size_t bytes, uint64_t seed) {
  static const auto kHash = __builtin_cpu_supports("avx512f") ? xxh3_avx512
                            : __builtin_cpu_supports("avx2")  ? xxh3_avx2
                                                              : xxh3_any;
  return kHash(data, bytes, seed);
}

uint64_t tensor_checksum(const void* data, size_t bytes, uint64_t seed) {
  const char* const at = static_cast<const char*>(data);
  for (size_t done = 0; done < bytes; done += kChecksumPiece) {
    seed = piece_checksum(at + done, std::min(kChecksumPiece, bytes - done), seed);
  }
  return seed;
}

uint64_t copy_with_checksum(void* to, const void* from, size_t bytes, uint64_t seed) {
  char* const out = static_cast<char*>(to);
  const char* const in = static_cast<const char*>(from);
  for (size_t done = 0; done < bytes; done += kChecksumPiece) {
    const size_t piece = std::min(kChecksumPiece, bytes - done);
    std::memcpy(out + done, in + done, piece);
    seed = piece_checksum(out + done, piece, seed);
  }
  return seed;
}

}  // namespace parvl
