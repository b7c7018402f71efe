#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

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

// One thread a pair.
template <typename T>
__global__ void rotary_kernel(const T* x, int64_t stride, const typename WideOf<T>::type* cos,
                              const typename WideOf<T>::type* sin, T* y, int64_t pairs, int64_t heads, int64_t half,
                              bool inverse) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= pairs) return;
  const int64_t f = i % half, head = i / half % heads, row = i / half / heads;
  const auto c = cos[row * half + f], s = inverse ? -sin[row * half + f] : sin[row * half + f];
  const T* in = x + row * stride + head * 2 * half + f;
  T* out = y + (row * heads + head) * 2 * half + f;
  const auto low = widen(in[0]), high = widen(in[half]);
  out[0] = narrow<T>(low * c - high * s);
  out[half] = narrow<T>(high * c + low * s);
}

template <typename T>
__global__ void swiglu_kernel(const T* gate, const T* up, int64_t stride, T* y, int64_t columns) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, row = blockIdx.y;
  if (column >= columns) return;
  const auto g = widen(gate[row * stride + column]);
  y[row * columns + column] = narrow<T>(g * sigmoid(g) * widen(up[row * stride + column]));
}

template <typename T>
__global__ void swiglu_backward_kernel(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const auto g = widen(gate[i]), d = widen(dy[i]), s = sigmoid(g);
  dup[i] = narrow<T>(d * g * s);
  dgate[i] = narrow<T>(d * widen(up[i]) * s * (1 + g * (1 - s)));
}

template <typename T>
__global__ void quick_gelu_kernel(const T* x, T* y, int64_t count) {
  using Acc = typename WideOf<T>::type;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Acc v = widen(x[i]);
  y[i] = narrow<T>(v * sigmoid(Acc(1.702) * v));
}

template <typename T>
__global__ void quick_gelu_backward_kernel(const T* dy, const T* x, T* dx, int64_t count) {
  using Acc = typename WideOf<T>::type;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Acc a = Acc(1.702), v = widen(x[i]), s = sigmoid(a * v);
  dx[i] = narrow<T>(widen(dy[i]) * s * (1 + a * v * (1 - s)));
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
  const int64_t pairs = rows * heads * dim / 2;
  return dispatch(type, pairs, [&]<typename T>(T* t) {
    using Acc = typename WideOf<T>::type;
    rotary_kernel<T><<<blocks(pairs), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        in(x, t), stride, static_cast<const Acc*>(cos), static_cast<const Acc*>(sin), out(y, t), pairs, heads, dim / 2,
        inverse);
  });
}

int swiglu(Element type, const void* gate, const void* up, int64_t stride, void* y, int64_t rows, int64_t columns,
           void* stream) {
  constexpr int64_t kMaxRows = 65535;  // of a grid
  return dispatch(type, rows * columns, [&]<typename T>(T* t) {
    for (int64_t first = 0; first < rows; first += kMaxRows) {
      const dim3 grid(blocks(columns), static_cast<unsigned>(std::min(rows - first, kMaxRows)));
      swiglu_kernel<T><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          in(gate, t) + first * stride, in(up, t) + first * stride, stride, out(y, t) + first * columns, columns);
    }
  });
}

int swiglu_backward(Element type, const void* dy, const void* gate, const void* up, void* dgate, void* dup,
                    int64_t count, void* stream) {
  return dispatch(type, count, [&]<typename T>(T* t) {
    swiglu_backward_kernel<T><<<blocks(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        in(dy, t), in(gate, t), in(up, t), out(dgate, t), out(dup, t), count);
  });
}

int quick_gelu(Element type, const void* x, void* y, int64_t count, void* stream) {
  return dispatch(type, count, [&]<typename T>(T* t) {
    quick_gelu_kernel<T><<<blocks(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(in(x, t), out(y, t), count);
  });
}

int quick_gelu_backward(Element type, const void* dy, const void* x, void* dx, int64_t count, void* stream) {
  return dispatch(type, count, [&]<typename T>(T* t) {
    quick_gelu_backward_kernel<T>
        <<<blocks(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(in(dy, t), in(x, t), out(dx, t), count);
  });
}

}  // namespace

const CudaElementwise kCudaElementwise = {rotary, swiglu, swiglu_backward, quick_gelu, quick_gelu_backward};

}  // namespace parvl::kernels
