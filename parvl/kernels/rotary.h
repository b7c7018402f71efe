// Rotary position embedding of packed heads, one pass.
#pragma once

#include <cstdint>

#include "parvl/kernels/types.h"

namespace parvl::kernels {

// Rows [begin, end) of x, each `heads` × `dim` (rows `stride` values apart in x, packed in y): pair (i, i + dim/2) of a
// head is turned by the angle whose cosine and sine stand in cos, sin [rows, dim/2]. `inverse` turns back.
template <typename T>
void rotary(const T* x, int64_t stride, const WideT<T>* cos, const WideT<T>* sin, T* y, int64_t heads, int64_t dim,
            bool inverse, int64_t begin, int64_t end);

}  // namespace parvl::kernels
