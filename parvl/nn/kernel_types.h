// From a tensor's dtype to the type that the CPU kernels take.
#pragma once

#include <ATen/ATen.h>

#include "parvl/kernels/types.h"

namespace parvl {

// Calls f with a value of the kernels' type; false for a dtype that they do not have (float16).
template <typename F>
bool with_kernel_type(at::ScalarType type, F f) {
  switch (type) {
    case at::kFloat:
      f(float{});
      return true;
    case at::kDouble:
      f(double{});
      return true;
    case at::kBFloat16:
      f(kernels::BFloat16{});
      return true;
    default:
      return false;
  }
}

template <typename T>
T* kernel_data(const at::Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

}  // namespace parvl
