// y = f(x · Wᵀ) for a handful of tokens on a GPU, where reading the weights once is nearly all of the time: what stands
// before and after the product in a decoder layer (RMSNorm, bias, residual, SwiGLU) is part of the same pass.
#pragma once

#include <cstdint>

namespace parvl::kernels {

constexpr int kDecodeLinearMatrices = 3;
constexpr int64_t kDecodeLinearTokens = 8;  // larger batches belong to a matrix library

// Device pointers, bfloat16, contiguous. Products and sums are float32; y is rounded once. No pointer may alias y but
// `residual`.
struct DecodeLinear {
  // Matrices [rows[i], in] over the same x, their outputs one after another in a row of y: queries, keys and values,
  // say. rows[i] and `in` are multiples of 16.
  const void* weight[kDecodeLinearMatrices] = {};
  const void* bias[kDecodeLinearMatrices] = {};  // [rows[i]] or null
  int64_t rows[kDecodeLinearMatrices] = {};
  int matrices = 1;
  const void* x = nullptr;  // [tokens, in]
  int64_t tokens = 0;       // 1 … kDecodeLinearTokens
  int64_t in = 0;
  const void* norm = nullptr;  // [in]: x / sqrt(mean(x²) + eps) ⊙ norm is multiplied instead of x; or null
  float eps = 0;
  const void* residual = nullptr;  // [tokens, Σ rows]: added; or null. May be y.
  bool swiglu = false;             // two matrices of equal rows, gate and up: y [tokens, rows[0]] is silu(gate) ⊙ up
  void* y = nullptr;               // [tokens, Σ rows]
};

// Launches one kernel on the stream (a cudaStream_t). It may start while the kernel before it on the stream ends
// (programmatic dependent launch). Returns cudaGetLastError(): 0 when launched; cudaErrorInvalidValue for arguments
// that the comments above exclude.
int decode_linear(const DecodeLinear& args, void* stream);

}  // namespace parvl::kernels
