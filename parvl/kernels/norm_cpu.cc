#include <cmath>

#include "parvl/kernels/norm.h"

namespace parvl::kernels {
namespace {

constexpr int64_t kLanes = 32;

// Σ f(i) for i < size with independent sums that a compiler can keep in vector registers.
template <typename Acc, typename F>
inline __attribute__((always_inline)) Acc sum_lanes(int64_t size, F f) {
  Acc sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += f(i + lane);
  }
  Acc total = 0;
  for (; i < size; ++i) total += f(i);
  for (int64_t lane = 0; lane < kLanes; ++lane) total += sums[lane];
  return total;
}

template <typename T>
inline __attribute__((always_inline)) void forward(const T* x, const T* weight, T* y, WideT<T>* rstd, double eps,
                                                   int64_t size, int64_t begin, int64_t end) {
  using Acc = WideT<T>;
  for (int64_t row = begin; row < end; ++row) {
    const T* in = x + row * size;
    T* out = y + row * size;
    const Acc square = sum_lanes<Acc>(size, [&](int64_t i) { return widen(in[i]) * widen(in[i]); });
    const Acc scale = 1 / std::sqrt(square / static_cast<Acc>(size) + static_cast<Acc>(eps));
    rstd[row] = scale;
    for (int64_t i = 0; i < size; ++i) out[i] = narrow<T>(widen(in[i]) * scale * widen(weight[i]));
  }
}

template <typename T>
inline __attribute__((always_inline)) void backward(const T* dy, const T* x, const T* weight, const WideT<T>* rstd,
                                                    T* dx, WideT<T>* dweight, int64_t size, int64_t begin,
                                                    int64_t end) {
  using Acc = WideT<T>;
  for (int64_t row = begin; row < end; ++row) {
    const T *g = dy + row * size, *in = x + row * size;
    T* out = dx + row * size;
    const Acc scale = rstd[row];
    const Acc dot = sum_lanes<Acc>(size, [&](int64_t i) { return widen(g[i]) * widen(weight[i]) * widen(in[i]); });
    const Acc shift = dot * scale * scale / static_cast<Acc>(size);
    for (int64_t i = 0; i < size; ++i)
      out[i] = narrow<T>(scale * (widen(g[i]) * widen(weight[i]) - widen(in[i]) * shift));
    if (dweight != nullptr) {
      for (int64_t i = 0; i < size; ++i) dweight[i] += widen(g[i]) * widen(in[i]) * scale;
    }
  }
}

#define PARVL_NORM(T, NAME)                                                                                   \
  PARVL_SIMD void NAME##_forward(const T* x, const T* weight, T* y, WideT<T>* rstd, double eps, int64_t size, \
                                 int64_t begin, int64_t end) {                                                \
    forward<T>(x, weight, y, rstd, eps, size, begin, end);                                                    \
  }                                                                                                           \
  PARVL_SIMD void NAME##_backward(const T* dy, const T* x, const T* weight, const WideT<T>* rstd, T* dx,      \
                                  WideT<T>* dweight, int64_t size, int64_t begin, int64_t end) {              \
    backward<T>(dy, x, weight, rstd, dx, dweight, size, begin, end);                                          \
  }
PARVL_NORM(float, norm_f32)
PARVL_NORM(double, norm_f64)
PARVL_NORM(BFloat16, norm_bf16)
#undef PARVL_NORM

}  // namespace

#define PARVL_NORM(T, NAME)                                                                                        \
  template <>                                                                                                      \
  void rms_norm(const T* x, const T* weight, T* y, WideT<T>* rstd, double eps, int64_t size, int64_t begin,        \
                int64_t end) {                                                                                     \
    NAME##_forward(x, weight, y, rstd, eps, size, begin, end);                                                     \
  }                                                                                                                \
  template <>                                                                                                      \
  void rms_norm_backward(const T* dy, const T* x, const T* weight, const WideT<T>* rstd, T* dx, WideT<T>* dweight, \
                         int64_t size, int64_t begin, int64_t end) {                                               \
    NAME##_backward(dy, x, weight, rstd, dx, dweight, size, begin, end);                                           \
  }
PARVL_NORM(float, norm_f32)
PARVL_NORM(double, norm_f64)
PARVL_NORM(BFloat16, norm_bf16)
#undef PARVL_NORM

}  // namespace parvl::kernels
