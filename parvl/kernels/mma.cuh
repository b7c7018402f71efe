// The tensor cores' product of 16-bit tiles and what its operands are packed from.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace parvl::kernels {

// c [16, 8] += a [16, 16] · b [16, 8]. Of a thread (lane = 4 · group + quad): a0 is row `group`, columns 2 · quad and
// the next; a1 row group + 8; a2, a3 the same rows, columns + 8. b0 is rows 2 · quad and the next of column `group`; b1
// rows
// + 8. c[0], c[1] are row `group`, columns 2 · quad and the next; c[2], c[3] row group + 8.
__device__ inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// The low, or the high, halves of two words.
__device__ inline uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ inline uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// The values of a tile of 16 tokens [16, D] as a thread uses them: dims of group `lane / 4` (D / 8 of them, two a word)
// of the tokens 2 · quad, the next, and those + 8. Tokens from `count` on are zeros: a page's unused places may hold
// anything, NaN too.
template <int D>
__device__ inline void load_values(uint32_t (&words)[4][D / 16], const __nv_bfloat16* v, int count) {
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = quad * 2 + i % 2 + i / 2 * 8;
#pragma unroll
    for (int p = 0; p < D / 16; p += 4) {
      uint4 four = {0, 0, 0, 0};
      if (token < count) four = *reinterpret_cast<const uint4*>(v + token * D + group * (D / 8) + p * 2);
      words[i][p] = four.x;
      words[i][p + 1] = four.y;
      words[i][p + 2] = four.z;
      words[i][p + 3] = four.w;
    }
  }
}

// Dim d of a head of 2 · half values turned by its angle.
__device__ inline float rotated(const __nv_bfloat16* head, const float* cos, const float* sin, int d, int half) {
  const int f = d % half;
  const float low = __bfloat162float(head[f]), high = __bfloat162float(head[f + half]);
  return d < half ? low * cos[f] - high * sin[f] : high * cos[f] + low * sin[f];
}

}  // namespace parvl::kernels
