#include "parvl/kernels/gemm_widened.h"
#include "parvl/kernels/lanes.h"

namespace parvl::kernels {
namespace {

constexpr int64_t kLanes = 8;  // one 256-bit register of floats
constexpr int kRows = 4;       // of x with
constexpr int kWide = 2;       // rows of w: eight sums and the operands, in 16 registers
using Vector = Lanes<kLanes>;
using Floats = Vector::Floats;

// A sum's order depends on k alone.
template <typename T, int Rows, int Wide>
PARVL_INLINE void block(const float* x, const T* w, const T* bias, T* y, int64_t n, int64_t k, int64_t o) {
  Floats sums[Rows][Wide] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    Floats weights[Wide];
#pragma GCC unroll 4
    for (int c = 0; c < Wide; ++c) weights[c] = Vector::load(w + (o + c) * k + i);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Floats values = Vector::load(x + r * k + i);
#pragma GCC unroll 4
      for (int c = 0; c < Wide; ++c) sums[r][c] += weights[c] * values;
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Wide; ++c) {
      float tail = bias ? widen(bias[o + c]) : 0.0f;
      for (int64_t j = i; j < k; ++j) tail += widen(w[(o + c) * k + j]) * x[r * k + j];
      y[r * n + o + c] = narrow<T>(Vector::sum(sums[r][c]) + tail);
    }
  }
}

template <typename T, int Wide>
PARVL_INLINE void all_rows(const float* x, const T* w, const T* bias, T* y, int64_t rows, int64_t n, int64_t k,
                           int64_t o) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) block<T, kRows, Wide>(x + r * k, w, bias, y + r * n, n, k, o);
  for (; r < rows; ++r) block<T, 1, Wide>(x + r * k, w, bias, y + r * n, n, k, o);
}

template <typename T>
PARVL_INLINE void all_outputs(const float* x, const T* w, const T* bias, T* y, int64_t rows, int64_t n, int64_t k,
                              int64_t begin, int64_t end) {
  int64_t o = begin;
  for (; o + kWide <= end; o += kWide) all_rows<T, kWide>(x, w, bias, y, rows, n, k, o);
  for (; o < end; ++o) all_rows<T, 1>(x, w, bias, y, rows, n, k, o);
}

PARVL_SIMD void run_f32(const float* x, const float* w, const float* bias, float* y, int64_t rows, int64_t n, int64_t k,
                        int64_t begin, int64_t end) {
  all_outputs(x, w, bias, y, rows, n, k, begin, end);
}
PARVL_SIMD void run_bf16(const float* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n,
                         int64_t k, int64_t begin, int64_t end) {
  all_outputs(x, w, bias, y, rows, n, k, begin, end);
}
PARVL_SIMD void run_widen(const BFloat16* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = widen(x[i]);
}

}  // namespace

void widen_values(const BFloat16* x, float* y, int64_t count) { run_widen(x, y, count); }

bool has_wide_registers() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool kHas = __builtin_cpu_supports("avx512f");
  return kHas;
#else
  return false;
#endif
}

template <>
void gemm_widened(const float* x, const float* w, const float* bias, float* y, int64_t rows, int64_t n, int64_t k,
                  int64_t begin, int64_t end) {
  run_f32(x, w, bias, y, rows, n, k, begin, end);
}

template <>
void gemm_widened(const float* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n,
                  int64_t k, int64_t begin, int64_t end) {
  run_bf16(x, w, bias, y, rows, n, k, begin, end);
}

}  // namespace parvl::kernels
