#include "parvl/kernels/rotary.h"

namespace parvl::kernels {
namespace {

template <typename T>
inline __attribute__((always_inline)) void turn(const T* x, int64_t stride, const WideT<T>* cos, const WideT<T>* sin,
                                                T* y, int64_t heads, int64_t dim, bool inverse, int64_t begin,
                                                int64_t end) {
  using Acc = WideT<T>;
  const int64_t half = dim / 2;
  const Acc sign = inverse ? -1 : 1;
  for (int64_t row = begin; row < end; ++row) {
    const Acc *c = cos + row * half, *s = sin + row * half;
    for (int64_t head = 0; head < heads; ++head) {
      const T* in = x + row * stride + head * dim;
      T* out = y + (row * heads + head) * dim;
      for (int64_t i = 0; i < half; ++i) {
        const Acc low = widen(in[i]), high = widen(in[i + half]), sine = sign * s[i];
        out[i] = narrow<T>(low * c[i] - high * sine);
        out[i + half] = narrow<T>(high * c[i] + low * sine);
      }
    }
  }
}

#define PARVL_ROTARY(T, NAME)                                                                                     \
  PARVL_SIMD void NAME(const T* x, int64_t stride, const WideT<T>* cos, const WideT<T>* sin, T* y, int64_t heads, \
                       int64_t dim, bool inverse, int64_t begin, int64_t end) {                                   \
    turn<T>(x, stride, cos, sin, y, heads, dim, inverse, begin, end);                                             \
  }
PARVL_ROTARY(float, rotary_f32)
PARVL_ROTARY(double, rotary_f64)
PARVL_ROTARY(BFloat16, rotary_bf16)
#undef PARVL_ROTARY

}  // namespace

#define PARVL_ROTARY(T, NAME)                                                                                         \
  template <>                                                                                                         \
  void rotary(const T* x, int64_t stride, const WideT<T>* cos, const WideT<T>* sin, T* y, int64_t heads, int64_t dim, \
              bool inverse, int64_t begin, int64_t end) {                                                             \
    NAME(x, stride, cos, sin, y, heads, dim, inverse, begin, end);                                                    \
  }
PARVL_ROTARY(float, rotary_f32)
PARVL_ROTARY(double, rotary_f64)
PARVL_ROTARY(BFloat16, rotary_bf16)
#undef PARVL_ROTARY

}  // namespace parvl::kernels
