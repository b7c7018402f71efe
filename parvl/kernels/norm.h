// RMSNorm, forward and backward, one pass over each row.
#pragma once

#include <cstdint>

#include "parvl/kernels/types.h"

namespace parvl::kernels {

// y = x · rstd · weight and rstd = 1/√(mean(x²) + eps), rows [begin, end) of x [*, size]. T: float, double or BFloat16.
template <typename T>
void rms_norm(const T* x, const T* weight, T* y, WideT<T>* rstd, double eps, int64_t size, int64_t begin, int64_t end);

// dx for rows [begin, end); adds Σ over those rows of dy · x · rstd into dweight [size] when that is not null.
template <typename T>
void rms_norm_backward(const T* dy, const T* x, const T* weight, const WideT<T>* rstd, T* dx, WideT<T>* dweight,
                       int64_t size, int64_t begin, int64_t end);

}  // namespace parvl::kernels
