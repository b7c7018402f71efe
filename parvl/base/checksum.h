// The checksum of what goes from one process's memory to another's: XXH3-64, chained over pieces that stay in a core's
// cache between copying and hashing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace parvl {

inline constexpr size_t kChecksumPiece = 256 << 10;

// `seed`: the checksum of what came before; 0 at the beginning. At most kChecksumPiece bytes: longer data is taken
// piece by piece. By the widest vectors that the processor has, with the same result on all.
uint64_t piece_checksum(const void* data, size_t bytes, uint64_t seed);

// Of one tensor, after those before it.
uint64_t tensor_checksum(const void* data, size_t bytes, uint64_t seed);
// Copies, and takes the checksum of what was written.
uint64_t copy_with_checksum(void* to, const void* from, size_t bytes, uint64_t seed);

}  // namespace parvl
