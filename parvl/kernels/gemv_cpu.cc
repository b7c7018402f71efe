#include "parvl/kernels/gemv.h"
#include "parvl/kernels/lanes.h"

namespace parvl::kernels {
namespace {

constexpr int64_t kLanes = 16;  // one 512-bit register of floats
using Vector = Lanes<kLanes>;
using Floats = Vector::Floats;

// Several weight rows at a time read each x once, but they are short streams side by side, which the processor's own
// prefetching does not follow: 10 instead of 29 GB/s on one core without the prefetch of what comes behind them.
constexpr int64_t kAheadBytes = 8192;
constexpr int64_t kLineBytes = 64;

// Weight rows [o, o + Wide) with `Rows` rows of x. A sum's order depends on k alone, so a row's result does not depend
// on how many rows went together. `First`: the weights come from memory, not from the cache.
template <typename T, int Rows, int Wide, bool First>
PARVL_INLINE void dot_block(const float* x, const T* w, const T* bias, T* y, int64_t n, int64_t k, int64_t o) {
  Floats sums[Rows][Wide] = {};
  const T* block = w + o * k;
  const char* ahead = reinterpret_cast<const char*>(block + Wide * k) + kAheadBytes;
  constexpr int64_t kStepBytes = Wide * kLanes * static_cast<int64_t>(sizeof(T));
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    if constexpr (First) {
      for (int64_t line = 0; line < kStepBytes; line += kLineBytes) __builtin_prefetch(ahead + line, 0, 2);
      ahead += kStepBytes;
    }
    Floats values[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) values[r] = Vector::load(x + r * k + i);
#pragma GCC unroll 8
    for (int c = 0; c < Wide; ++c) {
      const Floats weights = Vector::load(block + c * k + i);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sums[r][c] += weights * values[r];
    }
  }
  for (int c = 0; c < Wide; ++c) {
    for (int r = 0; r < Rows; ++r) {
      float tail = bias ? widen(bias[o + c]) : 0.0f;
      for (int64_t j = i; j < k; ++j) tail += widen(block[c * k + j]) * x[r * k + j];
      y[r * n + o + c] = narrow<T>(Vector::sum(sums[r][c]) + tail);
    }
  }
}

// The rows of x, four at a time, with a block of weights that stays in the cache meanwhile.
template <typename T, int Wide>
PARVL_INLINE void all_rows(const float* x, const T* w, const T* bias, T* y, int64_t rows, int64_t n, int64_t k,
                           int64_t o) {
  dot_block<T, 4, Wide, true>(x, w, bias, y, n, k, o);
  int64_t r = 4;
  for (; r + 4 <= rows; r += 4) dot_block<T, 4, Wide, false>(x + r * k, w, bias, y + r * n, n, k, o);
  for (; r < rows; ++r) dot_block<T, 1, Wide, false>(x + r * k, w, bias, y + r * n, n, k, o);
}

// One to three rows: more of the weights side by side, as many sums as fit the registers.
template <typename T, int Wide>
PARVL_INLINE void few_rows(const float* x, const T* w, const T* bias, T* y, int64_t rows, int64_t n, int64_t k,
                           int64_t o) {
  if (rows == 1) return dot_block<T, 1, Wide, true>(x, w, bias, y, n, k, o);
  dot_block<T, 2, Wide, true>(x, w, bias, y, n, k, o);
  if (rows == 3) dot_block<T, 1, Wide, false>(x + 2 * k, w, bias, y + 2 * n, n, k, o);
}

template <typename T>
PARVL_INLINE void gemv_rows(const float* x, const T* w, const T* bias, T* y, int64_t rows, int64_t n, int64_t k,
                            int64_t begin, int64_t end) {
  int64_t o = begin;
  if (rows >= 4) {
    for (; o + 4 <= end; o += 4) all_rows<T, 4>(x, w, bias, y, rows, n, k, o);
    for (; o < end; ++o) all_rows<T, 1>(x, w, bias, y, rows, n, k, o);
  } else {
    for (; o + 8 <= end; o += 8) few_rows<T, 8>(x, w, bias, y, rows, n, k, o);
    for (; o < end; ++o) few_rows<T, 1>(x, w, bias, y, rows, n, k, o);
  }
}

PARVL_SIMD void gemv_f32(const float* x, const float* w, const float* bias, float* y, int64_t rows, int64_t n,
                         int64_t k, int64_t begin, int64_t end) {
  gemv_rows<float>(x, w, bias, y, rows, n, k, begin, end);
}
PARVL_SIMD void gemv_bf16(const float* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n,
                          int64_t k, int64_t begin, int64_t end) {
  gemv_rows<BFloat16>(x, w, bias, y, rows, n, k, begin, end);
}

}  // namespace

template <>
void gemv(const float* x, const float* w, const float* bias, float* y, int64_t rows, int64_t n, int64_t k,
          int64_t begin, int64_t end) {
  gemv_f32(x, w, bias, y, rows, n, k, begin, end);
}

template <>
void gemv(const float* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n, int64_t k,
          int64_t begin, int64_t end) {
  gemv_bf16(x, w, bias, y, rows, n, k, begin, end);
}

}  // namespace parvl::kernels
