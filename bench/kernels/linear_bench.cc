// Times y = x · wᵀ in bfloat16 on the CPU: each kernel that this processor can run and the library's product, for the
// matrices of a 0.5B model, by the number of rows of x. GB/s of the weight's bytes and the speed over the library's.
//
//   linear_bench THREADS
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "parvl/base/clock.h"
#include "parvl/kernels/gemm_amx.h"
#include "parvl/kernels/gemm_bf16.h"
#include "parvl/nn/cpu_ops.h"
#include "parvl/nn/kernel_types.h"

namespace parvl {
namespace {

using kernels::BFloat16;

constexpr int kRepeats = 3;
constexpr int64_t kMatrices = 24;  // one after the other, so that no cache holds the weights

template <typename Multiply>
double median_seconds(Multiply multiply) {
  const RealClock clock;
  std::vector<double> seconds;
  for (int i = 0; i < kRepeats; ++i) {
    const double start = clock.now_seconds();
    multiply();
    seconds.push_back(clock.now_seconds() - start);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[kRepeats / 2];
}

// `kernel(x, w, y, begin, end)` as linears() shares it out.
template <typename Kernel>
at::Tensor shared_out(const at::Tensor& x, const at::Tensor& w, Kernel kernel) {
  at::Tensor y = at::empty({x.size(0), w.size(0)}, x.options());
  at::parallel_for(0, w.size(0), 1, [&](int64_t begin, int64_t end) { kernel(w, y, begin, end); });
  return y;
}

at::Tensor by_dot(const at::Tensor& x, const at::Tensor& w) {
  return shared_out(x, w, [&](const at::Tensor& weight, const at::Tensor& y, int64_t begin, int64_t end) {
    kernels::gemm_bf16(kernel_data<BFloat16>(x), kernel_data<BFloat16>(weight), nullptr, kernel_data<BFloat16>(y),
                       x.size(0), w.size(0), x.size(1), begin, end);
  });
}

at::Tensor by_tiles(const at::Tensor& x, const at::Tensor& w) {
  const auto packed = kernels::pack_for_amx(kernel_data<BFloat16>(x), x.size(0), x.size(1));
  return shared_out(x, w, [&](const at::Tensor& weight, const at::Tensor& y, int64_t begin, int64_t end) {
    kernels::gemm_amx(packed.data(), kernel_data<BFloat16>(weight), nullptr, kernel_data<BFloat16>(y), x.size(0),
                      w.size(0), x.size(1), begin, end);
  });
}

template <typename Multiply>
void line(const char* name, const at::Tensor& x, const std::vector<at::Tensor>& ws, Multiply multiply) {
  const auto library = [&](const at::Tensor& w) { return at::linear(x, w); };
  const at::Tensor exact = at::linear(x.to(at::kFloat), ws[0].to(at::kFloat));
  const double error = (multiply(ws[0]).to(at::kFloat) - exact).abs().max().template item<double>() /
                       exact.abs().max().template item<double>();
  const double mine = median_seconds([&] {
    for (const at::Tensor& w : ws) multiply(w);
  });
  const double theirs = median_seconds([&] {
    for (const at::Tensor& w : ws) library(w);
  });
  const double bytes = static_cast<double>(ws[0].nbytes()) * static_cast<double>(ws.size());
  std::printf("%5ld x %6ld, %4ld rows, %-18s error %.1e  %7.2f GB/s  %5.2f x library\n",
              static_cast<long>(ws[0].size(0)), static_cast<long>(ws[0].size(1)), static_cast<long>(x.size(0)), name,
              error, bytes / mine / 1e9, theirs / mine);
  std::fflush(stdout);
}

void run() {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{4864, 896}, {896, 4864}}) {
    std::vector<at::Tensor> ws;
    for (int64_t i = 0; i < kMatrices; ++i) ws.push_back(at::randn({n, k}, at::kFloat).to(at::kBFloat16));
    for (const int64_t rows : {1, 4, 8, 16, 32, 64, 128, 256}) {
      const at::Tensor x = at::randn({rows, k}, at::kFloat).to(at::kBFloat16);
      line("as linears() picks", x, ws, [&](const at::Tensor& w) { return cpu::linear(x, w, {}); });
      if (rows < kernels::kGemmBf16MinRows) continue;
      if (kernels::has_bf16_dot()) line("AVX512_BF16", x, ws, [&](const at::Tensor& w) { return by_dot(x, w); });
      if (kernels::has_amx()) line("AMX", x, ws, [&](const at::Tensor& w) { return by_tiles(x, w); });
    }
  }
}

}  // namespace
}  // namespace parvl

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: linear_bench THREADS\n");
    return 2;
  }
  at::set_num_threads(std::stoi(argv[1]));
  const at::NoGradGuard no_grad;
  parvl::run();
  return 0;
}
