#include "parvl/nn/layers.h"

#include "parvl/base/check.h"
#include "parvl/nn/fused_layer.h"

namespace parvl {

Linear make_linear(ParamTable& params, Module module, const std::string& name, int64_t in, int64_t out, bool bias,
                   Split split, int blocks) {
  Linear linear;
  const Shard columns{split == Split::kNone ? "" : "tp", split == Split::kRow ? 1 : 0, blocks};
  linear.weight = params.add(module, name + ".weight", {out, in}, Init::kNormal, columns);
  if (bias) {
    // A row-parallel bias is added once, after the sum over ranks, so it is whole on each.
    linear.bias = params.add(module, name + ".bias", {out}, Init::kZeros,
                             split == Split::kColumn ? Shard{"tp", 0, blocks} : Shard{});
  }
  return linear;
}

Norm make_norm(ParamTable& params, Module module, const std::string& name, int64_t size, double eps, bool with_bias) {
  Norm norm;
  norm.eps = eps;
  norm.weight = params.add(module, name + ".weight", {size}, Init::kOnes);
  if (with_bias) norm.bias = params.add(module, name + ".bias", {size}, Init::kZeros);
  return norm;
}

at::Tensor Mlp::operator()(const at::Tensor& x) const {
  if (gate.weight != nullptr) {
    const auto both = linears(x, {gate, up});
    return down(swiglu(both[0], both[1]));
  }
  const at::Tensor h = up(x);
  if (activation == "quick_gelu") return down(quick_gelu(h));
  if (activation == "silu") return down(at::silu(h));
  return down(at::gelu(h, activation == "gelu_pytorch_tanh" ? "tanh" : "none"));
}

at::Tensor DecoderLayer::operator()(const at::Tensor& x_TH, const RotaryTable& rope,
                                    AttentionBackend& attention) const {
  if (takes_fused_layer(*this, x_TH)) return fused_layer(*this, x_TH, rope, attention);
  const int64_t tokens = x_TH.size(0);
  const auto qkv = linears(attn_norm(x_TH), {q, k, v});
  const at::Tensor mixed_TH =
      attention
          .attend(index, qkv[0].view({tokens, heads, head_dim}), qkv[1].view({tokens, kv_heads, head_dim}),
                  qkv[2].view({tokens, kv_heads, head_dim}), rope)
          .reshape({tokens, heads * head_dim});
  const at::Tensor y_TH = x_TH + out(mixed_TH);
  return y_TH + mlp(mlp_norm(y_TH));
}

at::Tensor VisionBlock::operator()(const at::Tensor& x_PH, const RotaryTable& rope, const SeqLayout& layout) const {
  const int64_t patches = x_PH.size(0), width = x_PH.size(1);
  const at::Tensor qkv_P3ND = qkv(attn_norm(x_PH)).view({patches, 3 * heads, width / heads});
  const at::Tensor qk = rotary(qkv_P3ND.narrow(1, 0, 2 * heads), rope.cos, rope.sin);
  const at::Tensor mixed_PND = packed_attention(qk.narrow(1, 0, heads), qk.narrow(1, heads, heads),
                                                qkv_P3ND.narrow(1, 2 * heads, heads), layout, /*causal=*/false);
  const at::Tensor y_PH = x_PH + out(mixed_PND.reshape({patches, width}));
  return y_PH + mlp(mlp_norm(y_PH));
}

DecoderLayer make_decoder_layer(ParamTable& params, const BackboneSpec& spec, int64_t index) {
  const Module m = Module::kBackbone;
  const std::string prefix = "layers." + std::to_string(index) + ".";
  DecoderLayer layer;
  layer.index = index;
  layer.heads = spec.heads;
  layer.kv_heads = spec.kv_heads;
  layer.head_dim = spec.head_dim;
  const int64_t h = spec.hidden, q_out = spec.heads * spec.head_dim, kv_out = spec.kv_heads * spec.head_dim;
  layer.attn_norm = make_norm(params, m, prefix + "attn_norm", h, spec.norm_eps, false);
  layer.q = make_linear(params, m, prefix + "attn.q", h, q_out, spec.qkv_bias, Split::kColumn);
  layer.k = make_linear(params, m, prefix + "attn.k", h, kv_out, spec.qkv_bias, Split::kColumn);
  layer.v = make_linear(params, m, prefix + "attn.v", h, kv_out, spec.qkv_bias, Split::kColumn);
  layer.out = make_linear(params, m, prefix + "attn.out", q_out, h, spec.out_bias, Split::kRow);
  layer.mlp_norm = make_norm(params, m, prefix + "mlp_norm", h, spec.norm_eps, false);
  layer.mlp.gate = make_linear(params, m, prefix + "mlp.gate", h, spec.intermediate, spec.mlp_bias, Split::kColumn);
  layer.mlp.up = make_linear(params, m, prefix + "mlp.up", h, spec.intermediate, spec.mlp_bias, Split::kColumn);
  layer.mlp.down = make_linear(params, m, prefix + "mlp.down", spec.intermediate, h, spec.mlp_bias, Split::kRow);
  return layer;
}

}  // namespace parvl
