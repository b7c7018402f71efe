// XXH3-64 of libxxhash's header, compiled once for each width of vectors (see CMakeLists.txt). The files include
// nothing else, so that no code for a wider processor gets into what others share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace parvl {

uint64_t xxh3_any(const void* data, size_t bytes, uint64_t seed);
uint64_t xxh3_avx2(const void* data, size_t bytes, uint64_t seed);
uint64_t xxh3_avx512(const void* data, size_t bytes, uint64_t seed);

}  // namespace parvl
