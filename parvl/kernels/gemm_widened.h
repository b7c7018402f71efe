// y = x · wᵀ (+ bias) for many rows of x on a processor with 256-bit registers: what gemv keeps in 32 registers of 512
// bits does not fit its 16, and for bfloat16 libraries multiply value by value where there is no instruction.
#pragma once

#include <cstdint>

#include "parvl/kernels/types.h"

namespace parvl::kernels {

constexpr int64_t kGemmWidenedMinRows = 4;  // fewer are reads of the weight, which gemv does as fast

// Whether this processor has registers of 512 bits.
bool has_wide_registers();

// x [rows, k] widened to float32, w [n, k], bias [n] or null, y [rows, n]; outputs [begin, end) of n for every row.
// Products and sums in float32; a row's result does not depend on the other rows. T: float or BFloat16. Fastest when x
// stays in the second-level cache.
template <typename T>
void gemm_widened(const float* x, const T* w, const T* bias, T* y, int64_t rows, int64_t n, int64_t k, int64_t begin,
                  int64_t end);

// x in float32.
void widen_values(const BFloat16* x, float* y, int64_t count);

}  // namespace parvl::kernels
