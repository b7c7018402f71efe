// Registers full of floats, as GCC's vectors: what the CPU products share. They stay inside a file, so how they would
// be passed to another does not matter.
#pragma once

#include <cstdint>
#include <cstring>

#include "parvl/kernels/types.h"

#pragma GCC diagnostic ignored "-Wpsabi"
#define PARVL_INLINE inline __attribute__((always_inline))

namespace parvl::kernels {

// Vectors of so many values; by hand, since GCC 12 drops the attribute where its size is a template parameter.
template <int64_t kLanes>
struct LaneTypes;
template <>
struct LaneTypes<8> {
  using Floats = float __attribute__((vector_size(32)));
  using Words = uint32_t __attribute__((vector_size(32)));
  using Halves = uint16_t __attribute__((vector_size(16)));
};
template <>
struct LaneTypes<16> {
  using Floats = float __attribute__((vector_size(64)));
  using Words = uint32_t __attribute__((vector_size(64)));
  using Halves = uint16_t __attribute__((vector_size(32)));
};

// `kLanes` floats at once.
template <int64_t kLanes>
struct Lanes {
  using Floats = typename LaneTypes<kLanes>::Floats;
  using Words = typename LaneTypes<kLanes>::Words;
  using Halves = typename LaneTypes<kLanes>::Halves;

  static PARVL_INLINE Floats load(const float* p) {
    Floats out;
    std::memcpy(&out, p, sizeof out);
    return out;
  }
  static PARVL_INLINE Floats load(const BFloat16* p) {
    Halves halves;
    std::memcpy(&halves, p, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    Floats out;
    std::memcpy(&out, &words, sizeof out);
    return out;
  }
  // In an order of its own, the same for every x.
  static PARVL_INLINE float sum(const Floats& x) {
    float lanes[kLanes];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
  }
};

}  // namespace parvl::kernels
