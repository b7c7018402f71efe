#include "parvl/kernels/gemm_bf16.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

namespace parvl::kernels {
namespace {

constexpr int64_t kStep = 32;  // values in a register, which is a line of the cache
constexpr int64_t kLineBytes = 64;
constexpr int64_t kAheadBytes = 8192;
constexpr int kWide = 6;  // with four rows of x: 24 sums, and the operands, in 32 registers
#define PARVL_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"), optimize("O3")))
#define PARVL_BF16_INLINE inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512bf16")))

PARVL_BF16_INLINE __m512bh load(const BFloat16* p, __mmask32 mask) {
  const __m512i words = _mm512_maskz_loadu_epi16(mask, p);
  __m512bh out;
  __builtin_memcpy(&out, &words, sizeof out);
  return out;
}

// `Rows` rows of x with `Wide` rows of w. `First`: the weights come from memory, where the processor's own prefetching
// does not follow short streams side by side.
template <int Rows, int Wide, bool First>
PARVL_BF16_INLINE void block(const BFloat16* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t n,
                             int64_t k, int64_t o) {
  __m512 sums[Rows][Wide];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < Wide; ++c) sums[r][c] = _mm512_setzero_ps();
  }
  const char* ahead = reinterpret_cast<const char*>(w + (o + Wide) * k) + kAheadBytes;
  for (int64_t i = 0; i < k; i += kStep) {
    if constexpr (First) {
      for (int line = 0; line < Wide; ++line) __builtin_prefetch(ahead + line * kLineBytes, 0, 2);
      ahead += Wide * kLineBytes;
    }
    const __mmask32 mask = k - i >= kStep ? ~__mmask32{0} : (__mmask32{1} << (k - i)) - 1;
    __m512bh values[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) values[r] = load(x + r * k + i, mask);
#pragma GCC unroll 8
    for (int c = 0; c < Wide; ++c) {
      const __m512bh weights = load(w + (o + c) * k + i, mask);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], values[r], weights);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < Wide; ++c) {
      const float total = _mm512_reduce_add_ps(sums[r][c]);
      y[r * n + o + c] = narrow<BFloat16>(total + (bias ? widen(bias[o + c]) : 0.0f));
    }
  }
}

// The rows of x, four at a time, with rows of w that stay in the cache meanwhile.
template <int Wide>
PARVL_BF16_INLINE void all_rows(const BFloat16* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows,
                                int64_t n, int64_t k, int64_t o) {
  block<4, Wide, true>(x, w, bias, y, n, k, o);
  int64_t r = 4;
  for (; r + 4 <= rows; r += 4) block<4, Wide, false>(x + r * k, w, bias, y + r * n, n, k, o);
  for (; r < rows; ++r) block<1, Wide, false>(x + r * k, w, bias, y + r * n, n, k, o);
}

PARVL_BF16 void run(const BFloat16* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n,
                    int64_t k, int64_t begin, int64_t end) {
  int64_t o = begin;
  for (; o + kWide <= end; o += kWide) all_rows<kWide>(x, w, bias, y, rows, n, k, o);
  for (; o < end; ++o) all_rows<1>(x, w, bias, y, rows, n, k, o);
}

}  // namespace

bool has_bf16_dot() {
  static const bool kHas =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return kHas;
}

void gemm_bf16(const BFloat16* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n,
               int64_t k, int64_t begin, int64_t end) {
  run(x, w, bias, y, rows, n, k, begin, end);
}

}  // namespace parvl::kernels

#else

#include <cstdlib>

namespace parvl::kernels {

bool has_bf16_dot() { return false; }
void gemm_bf16(const BFloat16*, const BFloat16*, const BFloat16*, BFloat16*, int64_t, int64_t, int64_t, int64_t,
               int64_t) {
  std::abort();  // never called: has_bf16_dot is false
}

}  // namespace parvl::kernels

#endif
