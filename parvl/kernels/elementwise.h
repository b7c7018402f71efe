// Elementwise operations fused into one pass, as plain C functions of a loadable library for GPUs. The CPU does the
// same through PyTorch's own operations and rotary.h; the tests compare the two.
#pragma once

#include <cstdint>

namespace parvl::kernels {

enum class Element : int32_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2 };

// Pointers are device memory, contiguous unless said otherwise; `stream` is a cudaStream_t. Each launches one kernel
// and returns cudaGetLastError() (0: launched). 16-bit values are computed in float32.
struct CudaElementwise {
  // As kernels::rotary; cos and sin in the element's wide type. `stride`: values between rows of x.
  int (*rotary)(Element type, const void* x, int64_t stride, const void* cos, const void* sin, void* y, int64_t rows,
                int64_t heads, int64_t dim, bool inverse, void* stream);
  // gate, up: rows of `columns` values that lie `stride` apart.
  int (*swiglu)(Element type, const void* gate, const void* up, int64_t stride, void* y, int64_t rows, int64_t columns,
                void* stream);
  int (*swiglu_backward)(Element type, const void* dy, const void* gate, const void* up, void* dgate, void* dup,
                         int64_t count, void* stream);
  // x · sigmoid(1.702 x)
  int (*quick_gelu)(Element type, const void* x, void* y, int64_t count, void* stream);
  int (*quick_gelu_backward)(Element type, const void* dy, const void* x, void* dx, int64_t count, void* stream);
};

extern const CudaElementwise kCudaElementwise;  // inside the library

}  // namespace parvl::kernels
