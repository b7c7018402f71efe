#include "parvl/nn/cpu_ops.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "parvl/base/check.h"
#include "parvl/kernels/gemm_amx.h"
#include "parvl/kernels/gemm_bf16.h"
#include "parvl/kernels/gemm_widened.h"
#include "parvl/kernels/gemv.h"
#include "parvl/kernels/norm.h"
#include "parvl/kernels/rotary.h"
#include "parvl/nn/kernel_types.h"

namespace parvl::cpu {
namespace {

using kernels::BFloat16;
using kernels::WideT;

at::ScalarType wide_type(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// Work below this many values is not worth waking another thread.
constexpr int64_t kGrain = 1 << 14;

int64_t grain_rows(int64_t row_size) { return std::max<int64_t>(1, kGrain / row_size); }

// Which of our products takes these rows.
enum class Product { kLibrary, kFloat, kFewBFloat16, kManyBFloat16, kBFloat16, kTiles };

// Values of widened rows that one product reads again and again: they stay in a core's second-level cache.
constexpr int64_t kCachedValues = 1 << 16;

Product product_for(const at::Tensor& x, absl::Span<const WeightBias> weights) {
  const int64_t rows = x.numel() / std::max<int64_t>(1, x.size(-1));
  if (x.is_cuda() || rows < 1) return Product::kLibrary;
  for (const WeightBias& part : weights) {
    if (!part.weight.is_contiguous() || part.weight.scalar_type() != x.scalar_type()) return Product::kLibrary;
  }
  const bool few = rows <= kernels::kGemvMaxRows;
  if (x.scalar_type() == at::kFloat) return few ? Product::kFloat : Product::kLibrary;
  if (x.scalar_type() != at::kBFloat16) return Product::kLibrary;
  if (!kernels::has_bf16_dot()) return few ? Product::kFewBFloat16 : Product::kManyBFloat16;
  if (rows < kernels::kGemmBf16MinRows) return Product::kFewBFloat16;
  if (kernels::has_amx() && x.size(-1) % kernels::kAmxStep == 0) {
    return rows <= kernels::kGemmAmxMaxRows ? Product::kTiles : Product::kLibrary;
  }
  return rows <= kernels::kGemmBf16MaxRows ? Product::kBFloat16 : Product::kLibrary;
}

// `multiply(part, y, begin, end)` for outputs [begin, end) of each weight. One parallel loop over the rows of all
// matrices: waking the threads costs as much as a small matrix.
template <typename Multiply>
void over_all_outputs(absl::Span<const WeightBias> weights, const std::vector<at::Tensor>& ys, int64_t work_a_row,
                      Multiply multiply) {
  int64_t total = 0;
  for (const WeightBias& part : weights) total += part.weight.size(0);
  at::parallel_for(0, total, grain_rows(work_a_row), [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      const int64_t n = weights[i].weight.size(0);
      const int64_t from = std::max<int64_t>(0, begin - first), to = std::min(n, end - first);
      if (from < to) multiply(weights[i], ys[i], from, to);
      first += n;
    }
  });
}

template <typename T>
const T* bias_data(const WeightBias& part) {
  return part.bias.defined() ? kernel_data<T>(part.bias) : nullptr;
}

// Rows of x that gemm_widened takes at once.
int64_t rows_at_once(int64_t k) { return std::max<int64_t>(kernels::kGemmWidenedMinRows, kCachedValues / k / 4 * 4); }

// A few rows, widened by the caller.
template <typename T>
void run_few_rows(const at::Tensor& wide_x, absl::Span<const WeightBias> weights, const std::vector<at::Tensor>& ys) {
  const int64_t k = wide_x.size(-1), rows = wide_x.numel() / k;
  const bool gemv = kernels::has_wide_registers() || rows < kernels::kGemmWidenedMinRows;
  const auto multiply = gemv ? kernels::gemv<T> : kernels::gemm_widened<T>;
  over_all_outputs(weights, ys, k * rows, [&](const WeightBias& part, const at::Tensor& y, int64_t from, int64_t to) {
    multiply(kernel_data<float>(wide_x), kernel_data<T>(part.weight), bias_data<T>(part), kernel_data<T>(y), rows,
             part.weight.size(0), k, from, to);
  });
}

// Many bfloat16 rows where the processor has no product for them: each thread widens some at a time.
void run_many_rows(const at::Tensor& x, absl::Span<const WeightBias> weights, const std::vector<at::Tensor>& ys) {
  const int64_t k = x.size(-1), rows = x.numel() / k, step = std::min(rows, rows_at_once(k));
  over_all_outputs(weights, ys, k * rows, [&](const WeightBias& part, const at::Tensor& y, int64_t from, int64_t to) {
    std::vector<float> wide(static_cast<size_t>(step * k));
    const int64_t n = part.weight.size(0);
    for (int64_t r = 0; r < rows; r += step) {
      const int64_t count = std::min(step, rows - r);
      kernels::widen_values(kernel_data<BFloat16>(x) + r * k, wide.data(), count * k);
      kernels::gemm_widened<BFloat16>(wide.data(), kernel_data<BFloat16>(part.weight), bias_data<BFloat16>(part),
                                      kernel_data<BFloat16>(y) + r * n, count, n, k, from, to);
    }
  });
}

void run_gemm_bf16(const at::Tensor& x, absl::Span<const WeightBias> weights, const std::vector<at::Tensor>& ys) {
  const int64_t k = x.size(-1), rows = x.numel() / k;
  over_all_outputs(weights, ys, k * rows, [&](const WeightBias& part, const at::Tensor& y, int64_t from, int64_t to) {
    kernels::gemm_bf16(kernel_data<BFloat16>(x), kernel_data<BFloat16>(part.weight), bias_data<BFloat16>(part),
                       kernel_data<BFloat16>(y), rows, part.weight.size(0), k, from, to);
  });
}

void run_gemm_amx(const at::Tensor& x, absl::Span<const WeightBias> weights, const std::vector<at::Tensor>& ys) {
  const int64_t k = x.size(-1), rows = x.numel() / k;
  const std::vector<BFloat16> packed = kernels::pack_for_amx(kernel_data<BFloat16>(x), rows, k);
  over_all_outputs(weights, ys, k * rows, [&](const WeightBias& part, const at::Tensor& y, int64_t from, int64_t to) {
    kernels::gemm_amx(packed.data(), kernel_data<BFloat16>(part.weight), bias_data<BFloat16>(part),
                      kernel_data<BFloat16>(y), rows, part.weight.size(0), k, from, to);
  });
}

}  // namespace

std::vector<at::Tensor> linears(const at::Tensor& input, absl::Span<const WeightBias> weights) {
  std::vector<at::Tensor> ys;
  const Product product = product_for(input, weights);
  if (product == Product::kLibrary) {
    for (const auto& [weight, bias] : weights) {
      ys.push_back(at::linear(input, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt));
    }
    return ys;
  }
  auto shape = input.sizes().vec();
  for (const WeightBias& part : weights) {
    shape.back() = part.weight.size(0);
    ys.push_back(at::empty(shape, input.options()));
  }
  const at::Tensor x = input.contiguous();
  if (product == Product::kTiles) {
    run_gemm_amx(x, weights, ys);
  } else if (product == Product::kBFloat16) {
    run_gemm_bf16(x, weights, ys);
  } else if (product == Product::kManyBFloat16) {
    run_many_rows(x, weights, ys);
  } else if (product == Product::kFloat) {
    run_few_rows<float>(x, weights, ys);
  } else {
    run_few_rows<BFloat16>(x.to(at::kFloat), weights, ys);
  }
  return ys;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return linears(x, {{weight, bias}}).front();
}

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps) {
  const at::Tensor x = input.contiguous();
  const int64_t size = x.size(-1), rows = x.numel() / size;
  auto rstd_shape = x.sizes().vec();
  rstd_shape.back() = 1;
  const at::Tensor rstd = at::empty(rstd_shape, x.options().dtype(wide_type(x)));
  const at::Tensor y = at::empty_like(x);
  const bool done = with_kernel_type(x.scalar_type(), [&]<typename T>(T) {
    at::parallel_for(0, rows, grain_rows(size), [&](int64_t begin, int64_t end) {
      kernels::rms_norm<T>(kernel_data<T>(x), kernel_data<T>(weight), kernel_data<T>(y), kernel_data<WideT<T>>(rstd),
                           eps, size, begin, end);
    });
  });
  if (done) return {y, rstd};
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor scale = at::rsqrt(wide.square().mean({-1}, true).add_(eps));
  return {(wide * scale).mul_(weight).to(x.scalar_type()), scale};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& dy, const at::Tensor& input,
                                                     const at::Tensor& rstd, const at::Tensor& weight, bool want_dw) {
  const at::Tensor x = input.contiguous();
  const int64_t size = x.size(-1), rows = x.numel() / size;
  const at::Tensor dx = at::empty_like(x);
  // One row of sums a part of the rows, added in order: the result does not depend on which thread took which part.
  const int64_t part = std::max<int64_t>(grain_rows(size), (rows + 63) / 64), parts = (rows + part - 1) / part;
  const at::Tensor dw = want_dw ? at::zeros({parts, size}, rstd.options()) : at::Tensor();
  const bool done = with_kernel_type(x.scalar_type(), [&]<typename T>(T) {
    at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; ++p) {
        kernels::rms_norm_backward<T>(kernel_data<T>(dy), kernel_data<T>(x), kernel_data<T>(weight),
                                      kernel_data<WideT<T>>(rstd), kernel_data<T>(dx),
                                      want_dw ? kernel_data<WideT<T>>(dw) + p * size : nullptr, size, p * part,
                                      std::min(rows, (p + 1) * part));
      }
    });
  });
  PARVL_CHECK(done, "a gradient of a type that is never trained in");
  return {dx, want_dw ? dw.sum({0}) : at::Tensor()};
}

at::Tensor rotary(const at::Tensor& x_TND, const at::Tensor& cos_TF, const at::Tensor& sin_TF, bool inverse) {
  const int64_t rows = x_TND.size(0), heads = x_TND.size(1), dim = x_TND.size(2);
  // The heads of a row must lie together; rows may be a slice of something wider.
  const at::Tensor x = x_TND.stride(2) == 1 && (heads == 1 || x_TND.stride(1) == dim) ? x_TND : x_TND.contiguous();
  const at::Tensor y = at::empty({rows, heads, dim}, x.options());
  const bool done = with_kernel_type(x.scalar_type(), [&]<typename T>(T) {
    at::parallel_for(0, rows, grain_rows(heads * dim), [&](int64_t begin, int64_t end) {
      kernels::rotary<T>(kernel_data<T>(x), x.stride(0), kernel_data<WideT<T>>(cos_TF), kernel_data<WideT<T>>(sin_TF),
                         kernel_data<T>(y), heads, dim, inverse, begin, end);
    });
  });
  if (done) return y;
  const at::Tensor cos = cos_TF.unsqueeze(1), sin = inverse ? sin_TF.unsqueeze(1).neg() : sin_TF.unsqueeze(1);
  const at::Tensor low = x.narrow(2, 0, dim / 2), high = x.narrow(2, dim / 2, dim / 2);
  return at::cat({low * cos - high * sin, high * cos + low * sin}, 2).to(x.scalar_type());
}

}  // namespace parvl::cpu
