// Attention of one new token a sequence over a paged key/value cache on a GPU. Rotary positions and the writing of the
// new key and value are part of it.
#pragma once

#include <cstdint>

namespace parvl::kernels {

// N query heads, K key heads, D head size, tokens a page.
struct DecodeAttentionShape {
  int64_t heads = 0, kv_heads = 0, dim = 0, block_size = 0;
};
// Whether there is a kernel: N / K ≤ 8, D 64 or 128, pages of a multiple of 16 tokens.
bool has_decode_attention(const DecodeAttentionShape& shape);

// Device pointers, bfloat16 unless said otherwise, contiguous. T sequences.
struct DecodeAttention {
  const void* qkv = nullptr;   // rows of (N + 2K) · D: queries, keys, values of the new tokens, before rotary
  const float* cos = nullptr;  // rows of D/2
  const float* sin = nullptr;
  void* keys = nullptr;  // this layer's pages [blocks, K, block_size, D]
  void* values = nullptr;
  const int32_t* block_table = nullptr;  // [T, table_stride]
  int64_t table_stride = 0;
  const int32_t* lengths = nullptr;  // [T], the new token included; 0: not a sequence, nothing is read or written
  const int32_t* rows = nullptr;     // [T]: the row of qkv, cos, sin and out that a sequence has; null: its own index
  int64_t sequences = 0;             // T
  int64_t heads = 0, kv_heads = 0, dim = 0, block_size = 0;
  // A sequence's tokens are divided among up to `splits` blocks of threads; the last of them to finish adds up.
  int64_t splits = 1;
  void* partial = nullptr;      // decode_attention_partial_bytes(...) bytes
  int32_t* finished = nullptr;  // [T · K], zero before the first launch and after each
  void* out = nullptr;          // rows of N · D
};

int64_t decode_attention_partial_bytes(int64_t sequences, int64_t kv_heads, int64_t dim, int64_t splits);

// softmax(q kᵀ / √D) v in float32 (one pass with a running maximum, as in paged_attention.h). Launches one kernel as
// decode_linear does; returns cudaGetLastError().
int decode_attention(const DecodeAttention& args, void* stream);

}  // namespace parvl::kernels
