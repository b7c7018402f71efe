#include "parvl/kernels/gemv.h"

namespace parvl::kernels {
namespace {

constexpr int64_t kLanes = 64;  // independent sums: enough for four 512-bit registers in flight

// The dot products of one weight row with `Rows` rows of x.
template <typename T, int Rows>
inline __attribute__((always_inline)) void dot_rows(const float* x, const T* w, int64_t k, float* out) {
  float sums[Rows][kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    for (int r = 0; r < Rows; ++r) {
      for (int64_t lane = 0; lane < kLanes; ++lane) sums[r][lane] += widen(w[i + lane]) * x[r * k + i + lane];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    float tail = 0;
    for (int64_t j = i; j < k; ++j) tail += widen(w[j]) * x[r * k + j];
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (int64_t lane = 0; lane < half; ++lane) sums[r][lane] += sums[r][lane + half];
    }
    out[r] = sums[r][0] + tail;
  }
}

template <typename T, int Rows>
inline __attribute__((always_inline)) void gemv_rows(const float* x, const T* w, const T* bias, T* y, int64_t n,
                                                     int64_t k, int64_t begin, int64_t end) {
  for (int64_t o = begin; o < end; ++o) {
    float out[Rows];
    dot_rows<T, Rows>(x, w + o * k, k, out);
    for (int r = 0; r < Rows; ++r) y[r * n + o] = narrow<T>(out[r] + (bias ? widen(bias[o]) : 0.0f));
  }
}

#define PARVL_GEMV(T, ROWS, NAME)                                                                            \
  PARVL_SIMD void NAME(const float* x, const T* w, const T* bias, T* y, int64_t n, int64_t k, int64_t begin, \
                       int64_t end) {                                                                        \
    gemv_rows<T, ROWS>(x, w, bias, y, n, k, begin, end);                                                     \
  }
PARVL_GEMV(float, 1, gemv_f32_1)
PARVL_GEMV(float, 2, gemv_f32_2)
PARVL_GEMV(float, 4, gemv_f32_4)
PARVL_GEMV(BFloat16, 1, gemv_bf16_1)
PARVL_GEMV(BFloat16, 2, gemv_bf16_2)
PARVL_GEMV(BFloat16, 4, gemv_bf16_4)
#undef PARVL_GEMV

}  // namespace

// Rows that are no power of two go as 2 + 1.
template <>
void gemv(const float* x, const float* w, const float* bias, float* y, int64_t rows, int64_t n, int64_t k,
          int64_t begin, int64_t end) {
  if (rows == 4) return gemv_f32_4(x, w, bias, y, n, k, begin, end);
  if (rows >= 2) gemv_f32_2(x, w, bias, y, n, k, begin, end);
  if (rows % 2 == 1) gemv_f32_1(x + (rows - 1) * k, w, bias, y + (rows - 1) * n, n, k, begin, end);
}

template <>
void gemv(const float* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n, int64_t k,
          int64_t begin, int64_t end) {
  if (rows == 4) return gemv_bf16_4(x, w, bias, y, n, k, begin, end);
  if (rows >= 2) gemv_bf16_2(x, w, bias, y, n, k, begin, end);
  if (rows % 2 == 1) gemv_bf16_1(x + (rows - 1) * k, w, bias, y + (rows - 1) * n, n, k, begin, end);
}

}  // namespace parvl::kernels
