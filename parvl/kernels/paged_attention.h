// Attention of one new token over a paged key/value cache.
#pragma once

#include <cstdint>

#include "parvl/kernels/types.h"

namespace parvl::kernels {

constexpr int64_t kPagedMaxDim = 512;
constexpr int64_t kPagedMaxBlock = 64;

// A layer's pages, head-major: [blocks, kv_heads, block_size, dim].
template <typename T>
struct Pages {
  const T* keys = nullptr;
  const T* values = nullptr;
  const int32_t* block_table = nullptr;  // the sequence's blocks in order
  int64_t block_size = 0;                // ≤ kPagedMaxBlock
  int64_t kv_heads = 0;
  int64_t dim = 0;     // ≤ kPagedMaxDim
  int64_t length = 0;  // tokens in the cache, the new one included
};

// q, out [heads, dim]; heads [begin, end). softmax(q kᵀ / √dim) v in float32 (float64 for double), one pass with a
// running maximum (Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018). T: float, double or
// BFloat16.
template <typename T>
void paged_attention_decode(const T* q, const Pages<T>& pages, T* out, int64_t heads, int64_t begin, int64_t end);

// What a row of keys (or values) and a page are made of: block_size tokens, `heads` heads of `bytes` bytes each.
struct PageShape {
  int64_t block_size = 0;
  int64_t heads = 0;
  int64_t bytes = 0;
};
// rows [count, heads, bytes] → their places in pages [blocks, heads, block_size, bytes]; places[i] = block · block_size
// + offset.
void write_pages(const char* rows, char* pages, const int32_t* places, int64_t count, const PageShape& shape);

}  // namespace parvl::kernels
