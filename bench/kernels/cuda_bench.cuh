// What the bench of the GPU kernels is made of: arrays, times of calls in a CUDA graph, errors against float64, and one
// line a kernel.
#pragma once

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace parvl::kernels {

using Bf16 = __nv_bfloat16;

inline void check(int error, const char* what) {
  if (error == 0) return;
  std::fprintf(stderr, "%s: CUDA error %d\n", what, error);
  std::exit(1);
}

// Device memory.
template <typename T>
class Array {
 public:
  explicit Array(size_t size) : size_(size) {
    T* p = nullptr;
    check(cudaMalloc(&p, size * sizeof(T)), "cudaMalloc");
    check(cudaMemset(p, 0, size * sizeof(T)), "cudaMemset");
    memory_.reset(p);
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    check(cudaMemcpy(memory_.get(), values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  T* get() const { return memory_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(T* p) const { cudaFree(p); }
  };
  size_t size_;
  std::unique_ptr<T, Free> memory_;
};

__global__ void fill_kernel(Bf16* to, size_t count, float scale, uint32_t seed);
// Uniform in ± scale, other values each time.
Array<Bf16> random_values(size_t count, float scale);

// Copies of an array, more than the cache holds, used in turn.
class Rotating {
 public:
  Rotating(size_t count, float scale, double bytes_of_all);
  Bf16* operator[](int i) const { return arrays_[static_cast<size_t>(i) % arrays_.size()].get(); }
  int size() const { return static_cast<int>(arrays_.size()); }

 private:
  std::vector<Array<Bf16>> arrays_;
};

// Median microseconds of one of `calls` calls in a captured graph (so launches cost what they cost in a step).
double time_us(cudaStream_t stream, int calls, const std::function<void(int)>& call);

// worst[0]: the largest |got − wanted(i)|, worst[1]: the largest |wanted(i)|, over every `stride`-th of `count` values.
template <typename F>
__global__ void compare_kernel(const Bf16* got, size_t count, size_t stride, F wanted, float* worst) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * stride;
  if (i >= count) return;
  const double right = wanted(i);
  // As integers, since these are not negative; NaN is above all others.
  const auto raise = [](float* to, double x) {
    atomicMax(reinterpret_cast<unsigned*>(to), __float_as_uint(fabsf(static_cast<float>(x))));
  };
  raise(worst, static_cast<double>(__bfloat162float(got[i])) - right);
  raise(worst + 1, right);
}

// The largest error of some thousand values spread over `got`, in parts of the largest value; wanted(i): a device
// lambda that computes value i in float64.
template <typename F>
double error_of(const Bf16* got, size_t count, F wanted) {
  constexpr size_t kSamples = 4096;
  constexpr unsigned kThreads = 64;
  size_t stride = std::max<size_t>(1, count / kSamples);
  stride += stride > 1 && stride % 2 == 0;  // so that samples do not all stand at one place of their rows
  const Array<float> worst(2);
  const size_t threads = (count + stride - 1) / stride;
  compare_kernel<<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads>>>(got, count, stride, wanted,
                                                                                           worst.get());
  float out[2] = {};
  check(cudaMemcpy(out, worst.get(), sizeof out, cudaMemcpyDeviceToHost), "comparison");
  return out[0] / out[1];
}

__device__ inline double wide(const void* p, int64_t i) {
  return static_cast<double>(__bfloat162float(static_cast<const Bf16*>(p)[i]));
}

// Dim d of softmax(q kᵀ / √D) v over positions 0 to count − 1 of a head of keys whose position p begins at place(p).
template <typename Place>
__device__ double attention_value(const Bf16* q, const void* keys, const void* values, int64_t D, int64_t d,
                                  int64_t count, Place place) {
  double highest = -INFINITY, sum = 0, value = 0;
  for (int64_t p = 0; p < count; ++p) {
    const int64_t at = place(p);
    double score = 0;
    for (int64_t e = 0; e < D; ++e) score += wide(q, e) * wide(keys, at + e);
    score *= rsqrt(static_cast<double>(D));
    const double top = fmax(highest, score), shrink = exp(highest - top), weight = exp(score - top);
    highest = top;
    sum = sum * shrink + weight;
    value = value * shrink + weight * wide(values, at + d);
  }
  return value / sum;
}

// Where everything runs, and what this GPU can do at most.
struct Bench {
  cudaStream_t stream = nullptr;
  cublasHandle_t blas = nullptr;
  double copy_tb_s = 0;       // a copy, bytes read and written
  double matrix_tflop_s = 0;  // cuBLAS's product of large bfloat16 matrices

  // One line. `library_us`: the library's time for the same; 0: none does it, and the share of the ceiling is told.
  void memory_row(const std::string& name, double error, double us, double bytes, double library_us = 0) const;
  void math_row(const std::string& name, double error, double us, double flops) const;

  // y [columns, rows] = x [columns, in] · weight [rows, in]ᵀ
  void multiply(const Bf16* weight, const Bf16* x, Bf16* y, int64_t rows, int64_t columns, int64_t in) const;
};

// cuda_bench_prefill.cu: the kernels that take many tokens.
void bench_prefill(const Bench& bench);

}  // namespace parvl::kernels
