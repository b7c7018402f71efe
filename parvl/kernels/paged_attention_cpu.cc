#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "parvl/kernels/paged_attention.h"

namespace parvl::kernels {
namespace {

constexpr int64_t kLanes = 16;

template <typename T>
inline __attribute__((always_inline)) WideT<T> dot(const WideT<T>* q, const T* k, int64_t dim) {
  using Acc = WideT<T>;
  Acc sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += q[i + lane] * widen(k[i + lane]);
  }
  Acc total = 0;
  for (; i < dim; ++i) total += q[i] * widen(k[i]);
  for (int64_t lane = 0; lane < kLanes; ++lane) total += sums[lane];
  return total;
}

// One block at a time: its scores, the new maximum, then its weighted values.
template <typename T>
inline __attribute__((always_inline)) void one_head(const T* q, const Pages<T>& pages, T* out, int64_t kv_head) {
  using Acc = WideT<T>;
  const int64_t dim = pages.dim;
  Acc scaled[kPagedMaxDim], sum[kPagedMaxDim] = {}, scores[kPagedMaxBlock];
  const Acc scale = 1 / std::sqrt(static_cast<Acc>(dim));
  for (int64_t i = 0; i < dim; ++i) scaled[i] = widen(q[i]) * scale;
  Acc maximum = -std::numeric_limits<Acc>::infinity(), total = 0;
  for (int64_t start = 0; start < pages.length; start += pages.block_size) {
    const int64_t count = std::min(pages.block_size, pages.length - start);
    const int64_t page =
        (pages.block_table[start / pages.block_size] * pages.kv_heads + kv_head) * pages.block_size * dim;
    Acc block_maximum = maximum;
    for (int64_t t = 0; t < count; ++t) {
      scores[t] = dot<T>(scaled, pages.keys + page + t * dim, dim);
      block_maximum = std::max(block_maximum, scores[t]);
    }
    const Acc shrink = std::exp(maximum - block_maximum);
    maximum = block_maximum;
    total *= shrink;
    for (int64_t i = 0; i < dim; ++i) sum[i] *= shrink;
    for (int64_t t = 0; t < count; ++t) {
      const Acc weight = std::exp(scores[t] - maximum);
      const T* value = pages.values + page + t * dim;
      total += weight;
      for (int64_t i = 0; i < dim; ++i) sum[i] += weight * widen(value[i]);
    }
  }
  for (int64_t i = 0; i < dim; ++i) out[i] = narrow<T>(sum[i] / total);
}

template <typename T>
inline __attribute__((always_inline)) void decode(const T* q, const Pages<T>& pages, T* out, int64_t heads,
                                                  int64_t begin, int64_t end) {
  const int64_t group = heads / pages.kv_heads;
  for (int64_t head = begin; head < end; ++head)
    one_head<T>(q + head * pages.dim, pages, out + head * pages.dim, head / group);
}

PARVL_SIMD void decode_f32(const float* q, const Pages<float>& p, float* out, int64_t heads, int64_t begin,
                           int64_t end) {
  decode<float>(q, p, out, heads, begin, end);
}
PARVL_SIMD void decode_f64(const double* q, const Pages<double>& p, double* out, int64_t heads, int64_t begin,
                           int64_t end) {
  decode<double>(q, p, out, heads, begin, end);
}
PARVL_SIMD void decode_bf16(const BFloat16* q, const Pages<BFloat16>& p, BFloat16* out, int64_t heads, int64_t begin,
                            int64_t end) {
  decode<BFloat16>(q, p, out, heads, begin, end);
}

}  // namespace

template <>
void paged_attention_decode(const float* q, const Pages<float>& p, float* out, int64_t heads, int64_t begin,
                            int64_t end) {
  decode_f32(q, p, out, heads, begin, end);
}
template <>
void paged_attention_decode(const double* q, const Pages<double>& p, double* out, int64_t heads, int64_t begin,
                            int64_t end) {
  decode_f64(q, p, out, heads, begin, end);
}
template <>
void paged_attention_decode(const BFloat16* q, const Pages<BFloat16>& p, BFloat16* out, int64_t heads, int64_t begin,
                            int64_t end) {
  decode_bf16(q, p, out, heads, begin, end);
}

void write_pages(const char* rows, char* pages, const int32_t* places, int64_t count, const PageShape& shape) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block = places[i] / shape.block_size, offset = places[i] % shape.block_size;
    for (int64_t head = 0; head < shape.heads; ++head) {
      std::memcpy(pages + ((block * shape.heads + head) * shape.block_size + offset) * shape.bytes,
                  rows + (i * shape.heads + head) * shape.bytes, static_cast<size_t>(shape.bytes));
    }
  }
}

}  // namespace parvl::kernels
