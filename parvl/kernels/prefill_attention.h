// Attention of many new tokens a sequence over a paged key/value cache on a GPU, and the writing of their keys and
// values.
#pragma once

#include <cstdint>

#include "parvl/kernels/decode_attention.h"

namespace parvl::kernels {

// Device pointers, bfloat16 unless said otherwise, contiguous. T rows, N query heads, K key heads, D head size; the
// shapes that has_decode_attention takes, but N / K may be any number.
struct StoreRows {
  const void* qkv = nullptr;   // [T, (N + 2K) · D] before rotary
  const float* cos = nullptr;  // [T, D/2]
  const float* sin = nullptr;
  const int32_t* places = nullptr;  // [T]: block · block_size + offset
  void* keys = nullptr;             // pages [blocks, K, block_size, D]
  void* values = nullptr;
  void* q = nullptr;  // [T, N · D]: the queries after rotary
  int64_t rows = 0;
  DecodeAttentionShape shape;
};
// Keys after rotary and values go to their places. Launches one kernel; returns cudaGetLastError().
int store_rows(const StoreRows& args, void* stream);

constexpr int kPrefillTile = 64;  // queries a block of threads takes

// A run of queries of one sequence that are next to each other.
struct PrefillTile {
  int32_t sequence = 0;  // row of the block table
  int32_t row = 0;       // of q and out
  int32_t position = 0;  // of the first in its sequence
  int32_t count = 0;     // ≤ kPrefillTile
};
struct PrefillAttention {
  const void* q = nullptr;  // [T, N · D] after rotary
  const void* keys = nullptr;
  const void* values = nullptr;
  const int32_t* block_table = nullptr;  // [sequences, table_stride]
  int64_t table_stride = 0;
  const PrefillTile* tiles = nullptr;
  int64_t num_tiles = 0;
  DecodeAttentionShape shape;
  void* out = nullptr;  // [T, N · D]: the rows that tiles name
};
// Causal: a query sees the keys of its own and earlier positions, all of them in the pages already. As decode_attention
// otherwise.
int prefill_attention(const PrefillAttention& args, void* stream);

}  // namespace parvl::kernels
