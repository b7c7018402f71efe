#define XXH_INLINE_ALL
#include <xxhash.h>

#include "parvl/base/xxh3.h"

uint64_t parvl::xxh3_any(const void* data, size_t bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(data, bytes, seed);
}
