// Layers as plain structs of Param handles; they know their shapes and nothing of devices or caches. Where a module is
// cut over ranks its layers take and give this rank's rows (nn/tensor_parallel.h); alone, these are all rows.
#pragma once

#include <string>

#include "parvl/nn/attention.h"
#include "parvl/nn/functions.h"
#include "parvl/nn/param.h"
#include "parvl/nn/tensor_parallel.h"

namespace parvl {

struct Linear : LinearWeights {
  at::Tensor operator()(const at::Tensor& x) const { return linear(x, *weight, bias); }
};

// How a linear is cut over ranks: by its outputs, in parts of whole units (heads; 0: single columns), or by its inputs.
struct Split {
  enum Kind { kNone, kColumn, kRow } kind = kNone;
  int64_t units = 0;
  int blocks = 1;       // see Shard
  bool copies = false;  // likewise
};
Linear make_linear(ParamTable& params, Module module, const std::string& name, int64_t in, int64_t out, bool bias,
                   Split split);
// The sum over the ranks of x · wᵀ, cut by its inputs, for this rank's rows; then the bias.
at::Tensor row_parallel(const Linear& linear, const at::Tensor& x_RI, const TensorParallel& ranks,
                        const RowSplit& rows);

// RMSNorm without a bias, LayerNorm with one.
struct Norm {
  const Param* weight = nullptr;
  const Param* bias = nullptr;
  double eps = 1e-6;
  at::Tensor operator()(const at::Tensor& x) const {
    return bias ? layer_norm(x, *weight, *bias, eps) : rms_norm(x, *weight, eps);
  }
};
Norm make_norm(ParamTable& params, Module module, const std::string& name, int64_t size, double eps, bool with_bias);

// act(x · up) · down, or silu(x · gate) ⊙ (x · up) · down when there is a gate.
struct Mlp {
  const TensorParallel* ranks = nullptr;
  std::string activation;
  Linear gate;  // gate.weight is null in an ungated MLP
  Linear up;
  Linear down;
  at::Tensor operator()(const at::Tensor& x, const RowSplit& rows) const;
};

// Pre-norm transformer block with causal, grouped-query attention (Llama, Qwen2).
struct DecoderLayer {
  const TensorParallel* ranks = nullptr;
  int64_t index = 0;
  int64_t heads = 0;     // of all ranks
  int64_t kv_heads = 0;  // likewise
  int64_t head_dim = 0;
  Norm attn_norm;
  Linear q, k, v, out;
  Norm mlp_norm;
  Mlp mlp;
  // `rope` of all rows.
  at::Tensor operator()(const at::Tensor& x_TH, const RotaryTable& rope, AttentionBackend& attention) const;
};

// Pre-norm ViT block with full attention inside each sequence of the layout.
struct VisionBlock {
  const TensorParallel* ranks = nullptr;
  int64_t row_unit = 1;  // rows that stay on one rank: what is merged later
  int64_t heads = 0;     // of all ranks
  Norm attn_norm;
  Linear qkv;  // rows: queries, then keys, then values
  Linear out;
  Norm mlp_norm;
  Mlp mlp;
  at::Tensor operator()(const at::Tensor& x_PH, const RotaryTable& rope, const SeqLayout& layout) const;
};

DecoderLayer make_decoder_layer(ParamTable& params, const BackboneSpec& spec, int64_t index);

}  // namespace parvl
