// Fused GPU operations from libparvl_cuda.so: tensors around kernels/elementwise.h. No autograd.
#pragma once

#include <ATen/ATen.h>

#include <tuple>

#include "parvl/base/status.h"

namespace parvl::cuda {

// Loads the library from beside the program. Without it the operations below run as several of PyTorch's.
absl::Status load_kernels();
// Whether the kernels take this tensor: loaded, on a GPU, of a type they have.
bool fits(const at::Tensor& x);

at::Tensor rotary(const at::Tensor& x_TND, const at::Tensor& cos_TF, const at::Tensor& sin_TF, bool inverse);
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up);
at::Tensor quick_gelu(const at::Tensor& x);
at::Tensor quick_gelu_backward(const at::Tensor& dy, const at::Tensor& x);

}  // namespace parvl::cuda
