// What the tests of GPU kernels share: arrays on the device, random values, errors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "parvl/base/rng.h"

namespace parvl::kernels {

using Bf16 = __nv_bfloat16;

#define CUDA_OK(call) ASSERT_EQ(static_cast<int>(call), 0) << cudaGetErrorString(cudaGetLastError())

inline bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// An array on the device and, as it was given, on the host. Poisoned with NaN when made by size.
template <typename T>
class Array {
 public:
  explicit Array(std::vector<T> values) : host_(std::move(values)) {
    cudaMalloc(&device_, host_.size() * sizeof(T) + 16);
    cudaMemcpy(device_, host_.data(), host_.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  explicit Array(size_t size) : host_(size) {
    cudaMalloc(&device_, size * sizeof(T) + 16);
    cudaMemset(device_, 0xff, size * sizeof(T));
  }
  ~Array() { cudaFree(device_); }
  Array(const Array&) = delete;
  T* get() { return device_; }
  const std::vector<T>& host() const { return host_; }
  std::vector<T> read() const {
    std::vector<T> out(host_.size());
    cudaMemcpy(out.data(), device_, out.size() * sizeof(T), cudaMemcpyDeviceToHost);
    return out;
  }

 private:
  std::vector<T> host_;
  T* device_ = nullptr;
};

inline std::vector<Bf16> random_bf16(Rng& rng, size_t count, double scale) {
  std::vector<Bf16> out(count);
  for (Bf16& x : out) x = __float2bfloat16(static_cast<float>(rng.normal() * scale));
  return out;
}
inline double wide(Bf16 x) { return static_cast<double>(__bfloat162float(x)); }

// ‖got − wanted‖ / ‖wanted‖; infinite when anything is not a number.
inline double error_of(const std::vector<Bf16>& got, const std::vector<double>& wanted) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double x = wide(got[i]);
    if (!std::isfinite(x)) return INFINITY;
    difference += (x - wanted[i]) * (x - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  return std::sqrt(difference / norm);
}
constexpr double kTolerance = 4e-3;  // bf16 rounds to 2^-9 relative; inputs, outputs and the normed x are rounded

}  // namespace parvl::kernels
