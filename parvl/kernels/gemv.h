// y = x · wᵀ (+ bias) for a few rows of x: reads the weight once, as it lies, at memory speed.
#pragma once

#include <cstdint>

#include "parvl/kernels/types.h"

namespace parvl::kernels {

// Beyond so many rows a matrix product that packs its operands is faster.
constexpr int64_t kGemvMaxRows = 8;

// x [rows, k] widened to float32, w [n, k] row-major, y [rows, n]; computes outputs [begin, end) of n for every row, so
// that threads can share the work. bias [n] or null. T: float or BFloat16; products and sums in float32. rows ≤
// kGemvMaxRows.
template <typename T>
void gemv(const float* x, const T* w, const T* bias, T* y, int64_t rows, int64_t n, int64_t k, int64_t begin,
          int64_t end);

}  // namespace parvl::kernels
