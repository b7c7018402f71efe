#include <cuda_runtime.h>

#include "parvl/kernels/decode_linear.h"
#include "parvl/kernels/launch.cuh"
#include "parvl/kernels/mma.cuh"

namespace parvl::kernels {
namespace {

// One block takes 16 rows (with SwiGLU 8 of gate and the same 8 of up) for all tokens; its warps divide the inputs
// among them and add their sums at the end. The products are mma.m16n8k16 with weights as the 16 rows and tokens as the
// 8 columns. A sum over k may go in any order, so each thread's 16-byte pieces of W and x are used as they come: of
// eight values, four serve one mma and four the next, and no value moves between threads. Everything a step needs is
// fetched while the step before it is computed.
constexpr int kTileRows = 16;
constexpr int kTokens = static_cast<int>(kDecodeLinearTokens);
constexpr int kFewTiles = 264;
constexpr int kStep = 64;  // inputs a warp takes at a time

struct Shape {
  int tiles[kDecodeLinearMatrices];  // of each matrix
  int rows_total;
};

__device__ uint4 load_weights(const __nv_bfloat16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ uint32_t times(uint32_t a, uint32_t b) {
  const __nv_bfloat162 y = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&y);
}
__device__ float sum_of_squares(uint32_t a) {
  const float2 f = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&a));
  return f.x * f.x + f.y * f.y;
}

// One warp's share of a step.
template <bool kNorm>
struct Inputs {
  uint4 x[2], norm[kNorm ? 2 : 1];  // by half of the step
};
struct Weights {
  uint4 low[2], high[2];  // rows 0-7 and 8-15
};

// A block's rows: those of `matrix` from `row` on, which are the outputs from `before` + `row` on.
struct Place {
  int matrix, row, before;
};
__device__ Place find_place(const DecodeLinear& a, const Shape& shape) {
  Place place = {};
  int tile = static_cast<int>(blockIdx.x);
  while (tile >= shape.tiles[place.matrix]) {
    tile -= shape.tiles[place.matrix];
    place.before += static_cast<int>(a.rows[place.matrix++]);
  }
  place.row = tile * kTileRows;
  return place;
}

// What a block's warps leave for its end.
template <int kWarps>
struct Sums {
  float products[kWarps][kTokens][kTileRows];
  float squares[kWarps][kTokens];  // of x, for the norm
};

template <int kWarps>
__device__ void leave(Sums<kWarps>& sums, const float (&acc)[4], float squares) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) sums.products[warp][quad * 2 + i % 2][(i / 2) * 8 + group] = acc[i];
  squares += __shfl_xor_sync(~0u, squares, 1);
  squares += __shfl_xor_sync(~0u, squares, 2);
  if (quad == 0) sums.squares[warp][group] = squares;
}

// Adds up the warps' sums and writes the block's outputs.
template <int kWarps, bool kNorm, bool kSwiglu>
__device__ void finish(const DecodeLinear& a, const Shape& shape, const Place& place, const Sums<kWarps>& sums) {
  constexpr int kOut = kSwiglu ? 8 : kTileRows;
  for (int i = threadIdx.x; i < kOut * static_cast<int>(a.tokens); i += kWarps * 32) {
    const int r = i % kOut, token = i / kOut;
    float value = 0, up = 0, square = 0;
#pragma unroll
    for (int v = 0; v < kWarps; ++v) {
      value += sums.products[v][token][r];
      if (kSwiglu) up += sums.products[v][token][r + 8];
      if (kNorm) square += sums.squares[v][token];
    }
    const float scale = kNorm ? rsqrtf(square / static_cast<float>(a.in) + a.eps) : 1;
    const auto bias = [&](int m) {
      const auto* b = static_cast<const __nv_bfloat16*>(a.bias[m]);
      return b == nullptr ? 0 : __bfloat162float(b[place.row + r]);
    };
    float y = value * scale + bias(place.matrix);
    if (kSwiglu) y = y / (1.0f + __expf(-y)) * (up * scale + bias(1));
    const int64_t at = static_cast<int64_t>(token) * shape.rows_total + place.before + place.row + r;
    if (a.residual != nullptr) y += __bfloat162float(static_cast<const __nv_bfloat16*>(a.residual)[at]);
    static_cast<__nv_bfloat16*>(a.y)[at] = __float2bfloat16(y);
  }
}

template <int kWarps, bool kNorm, bool kSwiglu>
__global__ void __launch_bounds__(kWarps * 32) decode_linear_kernel(const DecodeLinear a, const Shape shape) {
  __shared__ Sums<kWarps> sums;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int in = static_cast<int>(a.in);

  const Place place = kSwiglu ? Place{0, static_cast<int>(blockIdx.x) * 8, 0} : find_place(a, shape);
  const auto* low =
      static_cast<const __nv_bfloat16*>(a.weight[place.matrix]) + static_cast<int64_t>(place.row + group) * in;
  const auto* high = kSwiglu
                         ? static_cast<const __nv_bfloat16*>(a.weight[1]) + static_cast<int64_t>(place.row + group) * in
                         : low + 8 * static_cast<int64_t>(in);
  const auto* x = static_cast<const __nv_bfloat16*>(a.x) + static_cast<int64_t>(group) * in;
  const auto* norm = static_cast<const __nv_bfloat16*>(a.norm);
  const bool real = group < a.tokens;
  const auto fetch_weights = [&](Weights& to, int k0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = k0 + half * 32 + quad * 8;
      const bool inside = k < in;
      to.low[half] = inside ? load_weights(low + k) : uint4{0, 0, 0, 0};
      to.high[half] = inside ? load_weights(high + k) : uint4{0, 0, 0, 0};
    }
  };
  const auto fetch_inputs = [&](Inputs<kNorm>& to, int k0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = k0 + half * 32 + quad * 8;
      to.x[half] = real && k < in ? *reinterpret_cast<const uint4*>(x + k) : uint4{0, 0, 0, 0};
      if (kNorm) to.norm[half] = k < in ? *reinterpret_cast<const uint4*>(norm + k) : uint4{0, 0, 0, 0};
    }
  };

  constexpr int kStride = kWarps * kStep;
  float acc[4] = {}, squares = 0;
  int k0 = warp * kStep;
  Weights w, w_next;
  Inputs<kNorm> now, next;
  fetch_weights(w, k0);
  fetch_weights(w_next, k0 + kStride);
  wait_for_previous_kernel();  // weights never depend on it, x does
  fetch_inputs(now, k0);
  start_next_kernel();  // its weights may come while ours are summed
  for (; k0 < in; k0 += kStride) {
    fetch_inputs(next, k0 + kStride);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 b = now.x[half];
      if (kNorm) {
        const uint4 scale = now.norm[half];
        squares += sum_of_squares(b.x) + sum_of_squares(b.y) + sum_of_squares(b.z) + sum_of_squares(b.w);
        b = {times(b.x, scale.x), times(b.y, scale.y), times(b.z, scale.z), times(b.w, scale.w)};
      }
      const uint4 &l = w.low[half], &h = w.high[half];
      mma(acc, l.x, h.x, l.y, h.y, b.x, b.y);
      mma(acc, l.z, h.z, l.w, h.w, b.z, b.w);
    }
    w = w_next;
    now = next;
    fetch_weights(w_next, k0 + 2 * kStride);
  }

  leave(sums, acc, squares);
  __syncthreads();
  finish<kWarps, kNorm, kSwiglu>(a, shape, place, sums);
}

template <int kWarps, bool kNorm, bool kSwiglu>
int launch_warps(const DecodeLinear& a, const Shape& shape, int tiles, cudaStream_t stream) {
  return launch_dependent(decode_linear_kernel<kWarps, kNorm, kSwiglu>,
                          {dim3(static_cast<unsigned>(tiles)), kWarps * 32, stream}, a, shape);
}

template <bool kNorm, bool kSwiglu>
int launch(const DecodeLinear& a, cudaStream_t stream) {
  Shape shape = {};
  int tiles = 0;
  for (int i = 0; i < (kSwiglu ? 1 : a.matrices); ++i) {
    shape.tiles[i] = static_cast<int>(a.rows[i] / (kSwiglu ? 8 : kTileRows));
    shape.rows_total += static_cast<int>(a.rows[i]);
    tiles += shape.tiles[i];
  }
  // A processor holds few large blocks or many small ones. Where there are too few rows to give each processor two
  // blocks, more warps share a row; else shorter pauses at a block's end win (measured: docs/measurements).
  return tiles <= kFewTiles ? launch_warps<16, kNorm, kSwiglu>(a, shape, tiles, stream)
                            : launch_warps<4, kNorm, kSwiglu>(a, shape, tiles, stream);
}

bool is_valid(const DecodeLinear& a) {
  if (a.tokens < 1 || a.tokens > kDecodeLinearTokens || a.in < 16 || a.in % 16 != 0) return false;
  if (a.matrices < 1 || a.matrices > kDecodeLinearMatrices) return false;
  if (a.swiglu && (a.matrices != 2 || a.rows[0] != a.rows[1])) return false;
  for (int i = 0; i < a.matrices; ++i) {
    if (a.rows[i] < 16 || a.rows[i] % 16 != 0 || a.weight[i] == nullptr) return false;
  }
  return a.x != nullptr && a.y != nullptr;
}

}  // namespace

int decode_linear(const DecodeLinear& a, void* stream) {
  if (!is_valid(a)) return cudaErrorInvalidValue;
  const auto s = static_cast<cudaStream_t>(stream);
  if (a.swiglu) return a.norm ? launch<true, true>(a, s) : launch<false, true>(a, s);
  return a.norm ? launch<true, false>(a, s) : launch<false, false>(a, s);
}

}  // namespace parvl::kernels
