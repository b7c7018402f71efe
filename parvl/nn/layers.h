// Layers as plain structs of Param handles; they know their shapes and nothing of ranks, devices or caches.
#pragma once

#include <string>

#include "parvl/nn/attention.h"
#include "parvl/nn/functions.h"
#include "parvl/nn/param.h"

namespace parvl {

struct Linear : LinearWeights {
  at::Tensor operator()(const at::Tensor& x) const { return linear(x, *weight, bias); }
};

// How a linear's matrix splits over a tensor-parallel axis: by its outputs, by its inputs, or not at all.
enum class Split { kNone, kColumn, kRow };
Linear make_linear(ParamTable& params, Module module, const std::string& name, int64_t in, int64_t out, bool bias,
                   Split split, int blocks = 1);

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
  std::string activation;
  Linear gate;  // gate.weight is null in an ungated MLP
  Linear up;
  Linear down;
  at::Tensor operator()(const at::Tensor& x) const;
};

// Pre-norm transformer block with causal, grouped-query attention (Llama, Qwen2).
struct DecoderLayer {
  int64_t index = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  Norm attn_norm;
  Linear q, k, v, out;
  Norm mlp_norm;
  Mlp mlp;
  at::Tensor operator()(const at::Tensor& x_TH, const RotaryTable& rope, AttentionBackend& attention) const;
};

// Pre-norm ViT block with full attention inside each sequence of the layout.
struct VisionBlock {
  int64_t heads = 0;
  Norm attn_norm;
  Linear qkv;  // rows: queries, then keys, then values
  Linear out;
  Norm mlp_norm;
  Mlp mlp;
  at::Tensor operator()(const at::Tensor& x_PH, const RotaryTable& rope, const SeqLayout& layout) const;
};

DecoderLayer make_decoder_layer(ParamTable& params, const BackboneSpec& spec, int64_t index);

}  // namespace parvl
