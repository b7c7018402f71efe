#include "parvl/nn/cpu_ops.h"

namespace parvl::cpu {
namespace {

at::ScalarType accumulation_type(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return at::linear(x, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt);
}

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor wide = x.to(accumulation_type(x));
  const at::Tensor rstd = at::rsqrt(wide.square().mean({-1}, true).add_(eps));
  return {(wide * rstd).to(x.scalar_type()).mul_(weight), rstd};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd,
                                                     const at::Tensor& weight, bool want_dw) {
  const at::ScalarType acc = rstd.scalar_type();
  const at::Tensor xhat = x.to(acc) * rstd, wide_dy = dy.to(acc);
  const at::Tensor scaled = wide_dy * weight.to(acc);
  const at::Tensor dx = (scaled - xhat * (scaled * xhat).mean({-1}, true)) * rstd;
  at::Tensor dw;
  if (want_dw) dw = (wide_dy * xhat).reshape({-1, x.size(-1)}).sum({0});
  return {dx.to(x.scalar_type()), dw};
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate).mul_(up); }

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up) {
  return {at::silu_backward(dy * up, gate), at::silu(gate).mul_(dy)};
}

at::Tensor rotary(const at::Tensor& x_TND, const at::Tensor& cos_TF, const at::Tensor& sin_TF, bool inverse) {
  const at::Tensor cos = cos_TF.unsqueeze(1), sin = inverse ? sin_TF.unsqueeze(1).neg() : sin_TF.unsqueeze(1);
  const int64_t half = x_TND.size(2) / 2;
  const at::Tensor low = x_TND.narrow(2, 0, half), high = x_TND.narrow(2, half, half);
  return at::cat({low * cos - high * sin, high * cos + low * sin}, 2).to(x_TND.scalar_type());
}

}  // namespace parvl::cpu
