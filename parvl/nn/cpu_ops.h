// CPU operations that PyTorch lacks or does in many passes: tensors around the raw-pointer kernels of kernels/. No
// autograd.
#pragma once

#include <ATen/ATen.h>
#include <absl/types/span.h>

#include <tuple>
#include <vector>

namespace parvl::cpu {

struct WeightBias {
  at::Tensor weight;  // [O, I]
  at::Tensor bias;    // [O] or undefined
};
// x against each of the weights, as at::linear, but a few rows against 16- or 32-bit weights on the CPU go through our
// own products, all weights in one parallel loop. Any device.
std::vector<at::Tensor> linears(const at::Tensor& x, absl::Span<const WeightBias> weights);
// The same for one.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// y and 1/sqrt(mean(x²)+eps) per row (float32; float64 for float64).
std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
// dx, and dw in rstd's type (undefined unless want_dw).
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd,
                                                     const at::Tensor& weight, bool want_dw);
// `inverse` turns by the opposite angle, which is also the gradient.
at::Tensor rotary(const at::Tensor& x_TND, const at::Tensor& cos_TF, const at::Tensor& sin_TF, bool inverse);

}  // namespace parvl::cpu
