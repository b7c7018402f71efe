#include "parvl/nn/cuda_ops.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <atomic>

#include "parvl/kernels/elementwise.h"

namespace parvl::cuda {
namespace {

std::atomic<const kernels::CudaElementwise*> g_kernels{nullptr};

kernels::Element element(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return kernels::Element::kFloat64;
    case at::kBFloat16:
      return kernels::Element::kBFloat16;
    default:
      return kernels::Element::kFloat32;
  }
}

void* stream(const at::Tensor& x) {
  return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(x.device()).native_handle();
}

void check(int error) { TORCH_CHECK(error == 0, "a fused CUDA kernel did not launch: CUDA error ", error); }

}  // namespace

absl::Status load_kernels() {
  if (g_kernels.load() != nullptr) return absl::OkStatus();
  void* library = dlopen("libparvl_cuda.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    return absl::NotFoundError("libparvl_cuda.so (built when nvcc is there) is not beside the program");
  const void* symbol = dlsym(library, kernels::kCudaElementwiseSymbol);
  if (symbol == nullptr) return failed("libparvl_cuda.so is of another version than this program");
  g_kernels = static_cast<const kernels::CudaElementwise*>(symbol);
  return absl::OkStatus();
}

bool fits(const at::Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  return x.is_cuda() && g_kernels.load() != nullptr &&
         (type == at::kFloat || type == at::kDouble || type == at::kBFloat16);
}

at::Tensor rotary(const at::Tensor& x_TND, const at::Tensor& cos_TF, const at::Tensor& sin_TF, bool inverse) {
  const int64_t rows = x_TND.size(0), heads = x_TND.size(1), dim = x_TND.size(2);
  const at::Tensor x = x_TND.stride(2) == 1 && (heads == 1 || x_TND.stride(1) == dim) ? x_TND : x_TND.contiguous();
  const at::Tensor y = at::empty({rows, heads, dim}, x.options());
  check(g_kernels.load()->rotary(element(x), x.data_ptr(), x.stride(0), cos_TF.data_ptr(), sin_TF.data_ptr(),
                                 y.data_ptr(), rows, heads, dim, inverse, stream(x)));
  return y;
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor g = gate.contiguous(), u = up.contiguous(), y = at::empty_like(g);
  check(g_kernels.load()->swiglu(element(g), g.data_ptr(), u.data_ptr(), y.data_ptr(), g.numel(), stream(g)));
  return y;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor d = dy.contiguous(), g = gate.contiguous(), u = up.contiguous();
  const at::Tensor dgate = at::empty_like(g), dup = at::empty_like(u);
  check(g_kernels.load()->swiglu_backward(element(g), d.data_ptr(), g.data_ptr(), u.data_ptr(), dgate.data_ptr(),
                                          dup.data_ptr(), g.numel(), stream(g)));
  return {dgate, dup};
}

at::Tensor quick_gelu(const at::Tensor& x) {
  const at::Tensor in = x.contiguous(), y = at::empty_like(in);
  check(g_kernels.load()->quick_gelu(element(in), in.data_ptr(), y.data_ptr(), in.numel(), stream(in)));
  return y;
}

at::Tensor quick_gelu_backward(const at::Tensor& dy, const at::Tensor& x) {
  const at::Tensor d = dy.contiguous(), in = x.contiguous(), dx = at::empty_like(in);
  check(g_kernels.load()->quick_gelu_backward(element(in), d.data_ptr(), in.data_ptr(), dx.data_ptr(), in.numel(),
                                              stream(in)));
  return dx;
}

}  // namespace parvl::cuda
