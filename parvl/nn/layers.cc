#include "parvl/nn/layers.h"

#include "parvl/base/check.h"
#include "parvl/nn/fused_layer.h"

namespace parvl {

Linear make_linear(ParamTable& params, Module module, const std::string& name, int64_t in, int64_t out, bool bias,
                   Split split) {
  const int64_t cut = split.kind == Split::kRow ? in : out;
  const Shard shard{split.kind == Split::kNone  ? -1
                    : split.kind == Split::kRow ? 1
                                                : 0,
                    split.blocks, split.units > 0 ? split.units : cut / split.blocks, split.copies};
  Linear linear;
  linear.weight = params.add(module, name + ".weight", {out, in}, Init::kNormal, shard);
  if (bias) {
    // One that is cut by its inputs adds its bias once, after the sum over ranks, so it is whole on each.
    linear.bias =
        params.add(module, name + ".bias", {out}, Init::kZeros, split.kind == Split::kColumn ? shard : Shard{});
  }
  return linear;
}

at::Tensor row_parallel(const Linear& linear, const at::Tensor& x_RI, const TensorParallel& ranks,
                        const RowSplit& rows) {
  if (ranks.alone()) return linear(x_RI);
  const at::Tensor own = ranks.sum_rows(parvl::linear(x_RI, *linear.weight, nullptr), rows);
  return linear.bias == nullptr ? own : add_bias(own, *linear.bias);
}

Norm make_norm(ParamTable& params, Module module, const std::string& name, int64_t size, double eps, bool with_bias) {
  Norm norm;
  norm.eps = eps;
  norm.weight = params.add(module, name + ".weight", {size}, Init::kOnes);
  if (with_bias) norm.bias = params.add(module, name + ".bias", {size}, Init::kZeros);
  return norm;
}

at::Tensor Mlp::operator()(const at::Tensor& x, const RowSplit& rows) const {
  const at::Tensor all = ranks->gather_rows(x, rows);
  at::Tensor h;
  if (gate.weight != nullptr) {
    const auto both = linears(all, {gate, up});
    h = swiglu(both[0], both[1]);
  } else if (h = up(all); activation == "quick_gelu") {
    h = quick_gelu(h);
  } else if (activation == "silu") {
    h = at::silu(h);
  } else {
    h = at::gelu(h, activation == "gelu_pytorch_tanh" ? "tanh" : "none");
  }
  return row_parallel(down, h, *ranks, rows);
}

at::Tensor DecoderLayer::operator()(const at::Tensor& x_TH, const RotaryTable& rope,
                                    AttentionBackend& attention) const {
  if (takes_fused_layer(*this, x_TH)) return fused_layer(*this, x_TH, rope, attention);
  const RowSplit rows = ranks->split(rope.cos.size(0));
  const auto qkv = linears(ranks->gather_rows(attn_norm(x_TH), rows), {q, k, v});
  const auto by_head = [&](const at::Tensor& x) { return x.view({x.size(0), x.size(1) / head_dim, head_dim}); };
  const at::Tensor mixed_TND = attention.attend(index, by_head(qkv[0]), by_head(qkv[1]), by_head(qkv[2]), rope);
  const at::Tensor y_TH = x_TH + row_parallel(out, mixed_TND.flatten(1), *ranks, rows);
  return y_TH + mlp(mlp_norm(y_TH), rows);
}

at::Tensor VisionBlock::operator()(const at::Tensor& x_PH, const RotaryTable& rope, const SeqLayout& layout) const {
  const RowSplit rows = ranks->split(rope.cos.size(0), row_unit);
  const int64_t head_dim = x_PH.size(1) / heads;
  const at::Tensor qkv_P3ND = qkv(ranks->gather_rows(attn_norm(x_PH), rows)).unflatten(1, {-1, head_dim});
  const int64_t own = qkv_P3ND.size(1) / 3;  // heads
  // Split, not narrowed: the gradients of the parts are then put together in one pass.
  const auto parts = qkv_P3ND.split_with_sizes({2 * own, own}, 1);
  const auto qk = rotary(parts[0], rope.cos, rope.sin).split(own, 1);
  const at::Tensor mixed_PND = packed_attention(qk[0], qk[1], parts[1], layout, /*causal=*/false);
  const at::Tensor y_PH = x_PH + row_parallel(out, mixed_PND.flatten(1), *ranks, rows);
  return y_PH + mlp(mlp_norm(y_PH), rows);
}

DecoderLayer make_decoder_layer(ParamTable& params, const BackboneSpec& spec, int64_t index) {
  const Module m = Module::kBackbone;
  const std::string prefix = "layers." + std::to_string(index) + ".";
  DecoderLayer layer;
  layer.ranks = layer.mlp.ranks = &params.ranks(m);
  layer.index = index;
  layer.heads = spec.heads;
  layer.kv_heads = spec.kv_heads;
  layer.head_dim = spec.head_dim;
  const int64_t h = spec.hidden, q_out = spec.heads * spec.head_dim, kv_out = spec.kv_heads * spec.head_dim;
  layer.attn_norm = make_norm(params, m, prefix + "attn_norm", h, spec.norm_eps, false);
  layer.q = make_linear(params, m, prefix + "attn.q", h, q_out, spec.qkv_bias, {Split::kColumn, spec.heads});
  layer.k = make_linear(params, m, prefix + "attn.k", h, kv_out, spec.qkv_bias,
                        {Split::kColumn, spec.kv_heads, 1, /*copies=*/true});
  layer.v = make_linear(params, m, prefix + "attn.v", h, kv_out, spec.qkv_bias,
                        {Split::kColumn, spec.kv_heads, 1, /*copies=*/true});
  layer.out = make_linear(params, m, prefix + "attn.out", q_out, h, spec.out_bias, {Split::kRow, spec.heads});
  layer.mlp_norm = make_norm(params, m, prefix + "mlp_norm", h, spec.norm_eps, false);
  layer.mlp.gate = make_linear(params, m, prefix + "mlp.gate", h, spec.intermediate, spec.mlp_bias, {Split::kColumn});
  layer.mlp.up = make_linear(params, m, prefix + "mlp.up", h, spec.intermediate, spec.mlp_bias, {Split::kColumn});
  layer.mlp.down = make_linear(params, m, prefix + "mlp.down", spec.intermediate, h, spec.mlp_bias, {Split::kRow});
  return layer;
}

}  // namespace parvl
