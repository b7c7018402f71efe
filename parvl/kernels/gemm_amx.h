// y = x · wᵀ (+ bias) in bfloat16 for a batch's rows of x on a processor with matrix tiles (AMX). Reads the weight as
// it lies, once for up to 32 rows, at memory speed; a library packs it first, which moves it three times.
#pragma once

#include <cstdint>
#include <vector>

#include "parvl/kernels/types.h"

namespace parvl::kernels {

constexpr int64_t kGemmAmxMaxRows = 64;  // with more, packing the weight pays
constexpr int64_t kAmxStep = 32;         // k is a multiple of it

// Whether this processor has the tiles and the kernel lets this process use them. The first call asks for that.
bool has_amx();

// x [rows, k] in the order in which the tiles take it.
std::vector<BFloat16> pack_for_amx(const BFloat16* x, int64_t rows, int64_t k);

// x as pack_for_amx gives it, w [n, k], bias [n] or null, y [rows, n]; outputs [begin, end) of n for every row.
// Products of pairs summed in float32, values below the smallest normal number taken as 0. A row's result does not
// depend on the other rows. Only when has_amx().
void gemm_amx(const BFloat16* packed_x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows, int64_t n,
              int64_t k, int64_t begin, int64_t end);

}  // namespace parvl::kernels
