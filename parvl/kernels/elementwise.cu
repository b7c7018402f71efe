#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "parvl/kernels/elementwise.h"

namespace parvl::kernels {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct WideOf {
  using type = T;
};
template <>
struct WideOf<__nv_bfloat16> {
  using type = float;
};

template <typename T>
__device__ typename WideOf<T>::type widen(T x) {
  return static_cast<typename WideOf<T>::type>(x);
}
template <typename T, typename Acc>
__device__ T narrow(Acc x) {
  return static_cast<T>(x);
}
__device__ float exponential(float x) { return expf(x); }
__device__ double exponential(double x) { return exp(x); }
template <typename Acc>
__device__ Acc sigmoid(Acc x) {
  return Acc(1) / (Acc(1) + exponential(-x));
}

// In 16 bits the result is rounded far more coarsely than what the fast instructions lose.
template <typename T>
__device__ typename WideOf<T>::type logistic(typename WideOf<T>::type x) {
  return sigmoid(x);
}
template <>
__device__ float logistic<__nv_bfloat16>(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

// N values that one thread reads or writes at once.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};
template <int N, typename T>
__device__ Pack<T, N> load(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <typename T, int N>
__device__ void store(T* p, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(p) = pack;
}
template <typename T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));

// One thread N pairs that lie side by side.
template <typename T, int N, typename Index>
__global__ void rotary_kernel(const T* x, int64_t stride, const typename WideOf<T>::type* cos,
                              const typename WideOf<T>::type* sin, T* y, Index packs, Index heads, Index half,
                              bool inverse) {
  const Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= packs) return;
  const Index each = half / N, f = i % each * N, head = i / each % heads, row = i / each / heads;
  const T* in = x + row * stride + head * 2 * half + f;
  T* out = y + (static_cast<int64_t>(row) * heads + head) * 2 * half + f;
  const auto low = load<N>(in), high = load<N>(in + half);
  const auto *c = cos + static_cast<int64_t>(row) * half + f, *s = sin + static_cast<int64_t>(row) * half + f;
  Pack<T, N> out_low, out_high;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const auto turn = inverse ? -s[k] : s[k];
    out_low.v[k] = narrow<T>(widen(low.v[k]) * c[k] - widen(high.v[k]) * turn);
    out_high.v[k] = narrow<T>(widen(high.v[k]) * c[k] + widen(low.v[k]) * turn);
  }
  store(out, out_low);
  store(out + half, out_high);
}

template <typename T, int N>
__global__ void swiglu_kernel(const T* gate, const T* up, int64_t stride, T* y, int64_t columns) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N, row = blockIdx.y;
  if (column >= columns) return;
  const auto gates = load<N>(gate + row * stride + column), ups = load<N>(up + row * stride + column);
  Pack<T, N> out;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const auto g = widen(gates.v[k]);
    out.v[k] = narrow<T>(g * logistic<T>(g) * widen(ups.v[k]));
  }
  store(y + row * columns + column, out);
}

template <typename T, int N>
__global__ void swiglu_backward_kernel(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t count) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i >= count) return;
  const auto dys = load<N>(dy + i), gates = load<N>(gate + i), ups = load<N>(up + i);
  Pack<T, N> out_gate, out_up;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const auto g = widen(gates.v[k]), d = widen(dys.v[k]), s = logistic<T>(g);
    out_up.v[k] = narrow<T>(d * g * s);
    out_gate.v[k] = narrow<T>(d * widen(ups.v[k]) * s * (1 + g * (1 - s)));
  }
  store(dgate + i, out_gate);
  store(dup + i, out_up);
}

template <typename T, int N>
__global__ void quick_gelu_kernel(const T* x, T* y, int64_t count) {
  using Acc = typename WideOf<T>::type;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i >= count) return;
  const auto in = load<N>(x + i);
  Pack<T, N> out;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const Acc v = widen(in.v[k]);
    out.v[k] = narrow<T>(v * logistic<T>(Acc(1.702) * v));
  }
  store(y + i, out);
}

template <typename T, int N>
__global__ void quick_gelu_backward_kernel(const T* dy, const T* x, T* dx, int64_t count) {
  using Acc = typename WideOf<T>::type;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i >= count) return;
  const auto dys = load<N>(dy + i), in = load<N>(x + i);
  Pack<T, N> out;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const Acc a = Acc(1.702), v = widen(in.v[k]), s = logistic<T>(a * v);
    out.v[k] = narrow<T>(widen(dys.v[k]) * s * (1 + a * v * (1 - s)));
  }
  store(dx + i, out);
}

// Calls f with the number of values a thread takes: 16 bytes of them where every row begins and ends at a multiple.
template <typename T, typename F>
void with_pack(std::initializer_list<const void*> arrays, std::initializer_list<int64_t> counts, F f) {
  bool whole = true;
  for (const void* array : arrays) whole = whole && (reinterpret_cast<uintptr_t>(array) & 15) == 0;
  for (const int64_t count : counts) whole = whole && count % kPack<T> == 0;
  if (whole) {
    f(std::integral_constant<int, kPack<T>>());
  } else {
    f(std::integral_constant<int, 1>());
  }
}

unsigned blocks(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

// Calls f with a null pointer of the element's type.
template <typename F>
int dispatch(Element type, int64_t count, F f) {
  if (count == 0) return 0;
  if (type == Element::kFloat32) {
    f(static_cast<float*>(nullptr));
  } else if (type == Element::kFloat64) {
    f(static_cast<double*>(nullptr));
  } else {
    f(static_cast<__nv_bfloat16*>(nullptr));
  }
  return static_cast<int>(cudaGetLastError());
}

template <typename T>
const T* in(const void* p, T*) {
  return static_cast<const T*>(p);
}
template <typename T>
T* out(void* p, T*) {
  return static_cast<T*>(p);
}

int rotary(Element type, const void* x, int64_t stride, const void* cos, const void* sin, void* y, int64_t rows,
           int64_t heads, int64_t dim, bool inverse, void* stream) {
  const int64_t half = dim / 2;
  return dispatch(type, rows * heads * half, [&]<typename T>(T* t) {
    using Acc = typename WideOf<T>::type;
    with_pack<T>({x, y}, {half, stride}, [&]<int N>(std::integral_constant<int, N>) {
      const int64_t packs = rows * heads * half / N;
      const auto launch = [&]<typename Index>(Index) {  // 32-bit divisions are several times faster
        rotary_kernel<T, N, Index><<<blocks(packs), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            in(x, t), stride, static_cast<const Acc*>(cos), static_cast<const Acc*>(sin), out(y, t),
            static_cast<Index>(packs), static_cast<Index>(heads), static_cast<Index>(half), inverse);
      };
      if (packs < (int64_t{1} << 31)) {
        launch(uint32_t{0});
      } else {
        launch(int64_t{0});
      }
    });
  });
}

int swiglu(Element type, const void* gate, const void* up, int64_t stride, void* y, int64_t rows, int64_t columns,
           void* stream) {
  constexpr int64_t kMaxRows = 65535;  // of a grid
  return dispatch(type, rows * columns, [&]<typename T>(T* t) {
    with_pack<T>({gate, up, y}, {columns, stride}, [&]<int N>(std::integral_constant<int, N>) {
      for (int64_t first = 0; first < rows; first += kMaxRows) {
        const dim3 grid(blocks(columns / N), static_cast<unsigned>(std::min(rows - first, kMaxRows)));
        swiglu_kernel<T, N><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            in(gate, t) + first * stride, in(up, t) + first * stride, stride, out(y, t) + first * columns, columns);
      }
    });
  });
}

int swiglu_backward(Element type, const void* dy, const void* gate, const void* up, void* dgate, void* dup,
                    int64_t count, void* stream) {
  return dispatch(type, count, [&]<typename T>(T* t) {
    with_pack<T>({dy, gate, up, dgate, dup}, {count}, [&]<int N>(std::integral_constant<int, N>) {
      swiglu_backward_kernel<T, N><<<blocks(count / N), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          in(dy, t), in(gate, t), in(up, t), out(dgate, t), out(dup, t), count);
    });
  });
}

int quick_gelu(Element type, const void* x, void* y, int64_t count, void* stream) {
  return dispatch(type, count, [&]<typename T>(T* t) {
    with_pack<T>({x, y}, {count}, [&]<int N>(std::integral_constant<int, N>) {
      quick_gelu_kernel<T, N>
          <<<blocks(count / N), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(in(x, t), out(y, t), count);
    });
  });
}

int quick_gelu_backward(Element type, const void* dy, const void* x, void* dx, int64_t count, void* stream) {
  return dispatch(type, count, [&]<typename T>(T* t) {
    with_pack<T>({dy, x, dx}, {count}, [&]<int N>(std::integral_constant<int, N>) {
      quick_gelu_backward_kernel<T, N><<<blocks(count / N), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          in(dy, t), in(x, t), out(dx, t), count);
    });
  });
}

}  // namespace

const CudaElementwise kCudaElementwise = {rotary, swiglu, swiglu_backward, quick_gelu, quick_gelu_backward};

}  // namespace parvl::kernels
