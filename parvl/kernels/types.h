// What CPU kernels share: 16-bit types as raw words, and how each type widens.
#pragma once

#include <bit>
#include <cstdint>

namespace parvl::kernels {

// bfloat16 as the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

template <typename T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};
// The type that sums are made in.
template <typename T>
using WideT = typename Wide<T>::type;

inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

template <typename T>
inline T narrow(WideT<T> x) {
  return x;
}
// Round to nearest, ties to even; NaN stays NaN.
template <>
inline BFloat16 narrow<BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(x != x ? 0x7fc0u : rounded)};
}

}  // namespace parvl::kernels

// Compiles a function for AVX-512, AVX2 and plain x86-64; the loader picks by the machine.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PARVL_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define PARVL_SIMD
#endif
