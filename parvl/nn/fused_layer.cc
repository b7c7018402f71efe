#include "parvl/nn/fused_layer.h"

#include "parvl/nn/cuda_ops.h"

namespace parvl {
namespace {

// [ΣO, …] over tensors that lie one after another in one block of memory; undefined when they do not.
at::Tensor joined_rows(const std::vector<at::Tensor>& parts) {
  int64_t rows = 0;
  const char* next = static_cast<const char*>(parts[0].data_ptr());
  for (const at::Tensor& part : parts) {
    if (part.data_ptr() != next || !part.is_contiguous() || !part.storage().is_alias_of(parts[0].storage())) return {};
    next += part.nbytes();
    rows += part.size(0);
  }
  auto sizes = parts[0].sizes().vec();
  sizes[0] = rows;
  return parts[0].as_strided(sizes, parts[0].strides());
}

// x + y · wᵀ + b into x.
void add_linear(const at::Tensor& x_TO, const at::Tensor& y_TI, const Linear& linear) {
  if (cuda::fits_decode(y_TI, {linear})) {
    cuda::decode_linear(y_TI, {linear}, {.residual = x_TO});
    return;
  }
  at::Tensor x = x_TO;
  x.addmm_(y_TI, linear.weight->value.t());
  if (linear.bias != nullptr) x.add_(linear.bias->value);
}

// x + y · wᵀ + b where w is cut by its inputs, on every rank: the first adds what is there once. May overwrite x.
at::Tensor add_linear(const at::Tensor& x_TO, const at::Tensor& y_TI, const Linear& linear,
                      const TensorParallel& ranks) {
  if (ranks.rank() == 0) {
    add_linear(x_TO, y_TI, linear);
    ranks.reduce(x_TO, ReduceOp::kSum);
    return x_TO;
  }
  const Linear part{linear.weight, nullptr};
  const at::Tensor out =
      cuda::fits_decode(y_TI, {part}) ? cuda::decode_linear(y_TI, {part}, {}) : at::linear(y_TI, part.weight->value);
  ranks.reduce(out, ReduceOp::kSum);
  return out;
}

at::Tensor norm_linears(const at::Tensor& x_TH, const Norm& norm, absl::Span<const LinearWeights> weights) {
  if (cuda::fits_decode(x_TH, weights)) {
    return cuda::decode_linear(x_TH, weights, {.norm = norm.weight, .eps = norm.eps});
  }
  return joined_linear(norm(x_TH), weights);
}

at::Tensor norm_swiglu(const at::Tensor& x_TH, const Norm& norm, const Mlp& mlp) {
  if (cuda::fits_decode(x_TH, {mlp.gate, mlp.up})) {
    return cuda::decode_linear(x_TH, {mlp.gate, mlp.up}, {.norm = norm.weight, .eps = norm.eps, .swiglu = true});
  }
  const at::Tensor both = joined_linear(norm(x_TH), {mlp.gate, mlp.up});
  const int64_t columns = both.size(1) / 2;
  return cuda::swiglu(both.narrow(1, 0, columns), both.narrow(1, columns, columns));
}

}  // namespace

at::Tensor joined_linear(const at::Tensor& x_TI, absl::Span<const LinearWeights> weights) {
  std::vector<at::Tensor> matrices, biases;
  for (const LinearWeights& part : weights) {
    matrices.push_back(part.weight->value);
    if (part.bias != nullptr) biases.push_back(part.bias->value);
  }
  const at::Tensor matrix = joined_rows(matrices);
  const at::Tensor bias = biases.empty() ? at::Tensor() : joined_rows(biases);
  const bool all_or_none = biases.empty() || (biases.size() == matrices.size() && bias.defined());
  if (matrix.defined() && all_or_none) {
    return at::linear(x_TI, matrix, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt);
  }
  return at::cat(linears(x_TI, weights), 1);
}

bool takes_fused_layer(const DecoderLayer& layer, const at::Tensor& x_TH) {
  return x_TH.scalar_type() == at::kBFloat16 && cuda::fits(x_TH) && x_TH.dim() == 2 && x_TH.is_contiguous() &&
         !at::GradMode::is_enabled() && !in_weight_grad_scope() && layer.attn_norm.bias == nullptr &&
         layer.mlp.gate.weight != nullptr && (layer.ranks->alone() || layer.ranks->whole_rows());
}

at::Tensor fused_layer(const DecoderLayer& layer, at::Tensor x_TH, const RotaryTable& rope,
                       AttentionBackend& attention) {
  const int64_t tokens = x_TH.size(0), dim = layer.head_dim;
  const int64_t heads = layer.q.weight->value.size(0) / dim, kv_heads = layer.k.weight->value.size(0) / dim;  // here
  const at::Tensor qkv = norm_linears(x_TH, layer.attn_norm, {layer.q, layer.k, layer.v});
  const auto part = [&](int64_t first, int64_t count) {
    return qkv.narrow(1, first * dim, count * dim).unflatten(1, {count, dim});
  };
  const at::Tensor mixed =
      attention.attend(layer.index, part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads), rope);
  x_TH = add_linear(x_TH, mixed.reshape({tokens, heads * dim}), layer.out, *layer.ranks);
  return add_linear(x_TH, norm_swiglu(x_TH, layer.mlp_norm, layer.mlp), layer.mlp.down, *layer.ranks);
}

}  // namespace parvl
