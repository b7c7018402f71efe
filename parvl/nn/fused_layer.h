// A decoder layer on a GPU without a graph, in as few passes over memory as there are kernels for: RMSNorm, bias,
// SwiGLU and residual inside the products for a few rows, and one product for matrices that lie side by side for many.
#pragma once

#include "parvl/nn/layers.h"

namespace parvl {

// Whether this layer has it: bfloat16 on a GPU with libparvl_cuda.so, no graph, RMSNorm and a gated MLP, and all rows
// here.
bool takes_fused_layer(const DecoderLayer& layer, const at::Tensor& x_TH);

// What DecoderLayer computes, but for rounding: sums that the plain way rounds to bfloat16 in between are float32 here.
// Overwrites x_TH, which is also the result.
at::Tensor fused_layer(const DecoderLayer& layer, at::Tensor x_TH, const RotaryTable& rope,
                       AttentionBackend& attention);

// x · [w0; w1; …]ᵀ + biases as one [T, ΣO] tensor: one product when the weights lie one after another in memory, as
// ParamTable::allocate places them.
at::Tensor joined_linear(const at::Tensor& x_TI, absl::Span<const LinearWeights> weights);

}  // namespace parvl
