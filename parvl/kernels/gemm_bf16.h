// y = x · wᵀ (+ bias) in bfloat16 for tens of rows of x, with the processor's own bfloat16 dot product. Reads the
// weight as it lies: a library that packs it first moves it three times, which costs more than these products.
#pragma once

#include <cstdint>

#include "parvl/kernels/types.h"

namespace parvl::kernels {

constexpr int64_t kGemmBf16MinRows = 4;   // fewer are reads of the weight, which gemv does as fast
constexpr int64_t kGemmBf16MaxRows = 32;  // with more, packing the operands pays

// Whether this processor has the instruction (AVX512_BF16).
bool has_bf16_dot();

// x [rows, k], w [n, k], bias [n] or null, y [rows, n]; outputs [begin, end) of n for every row. Products of pairs
// summed in float32. A row's result does not depend on the other rows. Only when has_bf16_dot();
// rows ≥ kGemmBf16MinRows.
void gemm_bf16(const BFloat16* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n,
               int64_t k, int64_t begin, int64_t end);

}  // namespace parvl::kernels
