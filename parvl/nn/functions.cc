#include "parvl/nn/functions.h"

#include <absl/container/inlined_vector.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/nn/cpu_ops.h"
#include "parvl/nn/cuda_ops.h"

namespace parvl {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

thread_local WeightGradQueue* t_queue = nullptr;
// A leaf that makes an operation's output part of the graph when only its weights are trained. It never receives a
// gradient.
thread_local at::Tensor t_anchor;

at::Tensor anchor_for(const Param& param, const Param* second = nullptr) {
  const bool trainable = param.trainable() || (second != nullptr && second->trainable());
  if (trainable && t_anchor.defined()) return t_anchor;
  static const at::Tensor kNone = at::zeros({1});
  return kNone;
}

// Operations keep Param and queue addresses in the graph; both outlive it (the model and the Segment own them).
int64_t pack(const void* pointer) { return reinterpret_cast<int64_t>(pointer); }
template <typename T>
T* unpack(AutogradContext* ctx, const char* name) {
  return reinterpret_cast<T*>(ctx->saved_data[name].toInt());
}

void submit(AutogradContext* ctx, std::function<void()> work) {
  auto* queue = unpack<WeightGradQueue>(ctx, "queue");
  PARVL_CHECK(queue != nullptr, "a trainable parameter was used outside a Segment");
  queue->submit(std::move(work));
}

at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

void add_bias_grad(const Param& bias, const at::Tensor& dy_TO) {
  bias.main_grad.add_(dy_TO.sum({0}, /*keepdim=*/false, bias.main_grad.scalar_type()));
}

// main_grad += dyᵀ · x
void add_weight_grad(const Param& weight, const at::Tensor& dy_TO, const at::Tensor& x_TI) {
  at::Tensor grad = weight.main_grad;
  if (grad.scalar_type() == dy_TO.scalar_type()) {
    grad.addmm_(dy_TO.t(), x_TI);
  } else if (dy_TO.is_cuda()) {
    at::addmm_out(grad, grad, dy_TO.t(), x_TI, grad.scalar_type());  // 16-bit factors, float32 sums
  } else {
    grad.add_(at::mm(dy_TO.t(), x_TI));
  }
}

struct LinearFn : Function<LinearFn> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& /*anchor*/, int64_t weight_ptr,
                            int64_t bias_ptr, int64_t queue) {
    const auto& weight = *reinterpret_cast<const Param*>(weight_ptr);
    const auto* bias = reinterpret_cast<const Param*>(bias_ptr);
    ctx->saved_data["weight"] = weight_ptr;
    ctx->saved_data["bias"] = bias_ptr;
    ctx->saved_data["queue"] = queue;
    ctx->save_for_backward({weight.trainable() ? x : at::Tensor()});
    return at::linear(x, weight.value, bias ? std::optional<at::Tensor>(bias->value) : std::nullopt);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto* weight = unpack<const Param>(ctx, "weight");
    const auto* bias = unpack<const Param>(ctx, "bias");
    const at::Tensor dy = rows_of(grads[0]);
    if (weight->trainable()) {
      const at::Tensor x = rows_of(ctx->get_saved_variables()[0]);
      submit(ctx, [weight, dy, x] { add_weight_grad(*weight, dy, x); });
    }
    if (bias != nullptr && bias->trainable()) {
      submit(ctx, [bias, dy] { add_bias_grad(*bias, dy); });
    }
    at::Tensor dx;
    if (ctx->needs_input_grad(0)) {
      auto shape = grads[0].sizes().vec();
      shape.back() = weight->value.size(1);
      dx = dy.mm(weight->value).view(shape);
    }
    return {dx, {}, {}, {}, {}};
  }
};

struct AddBiasFn : Function<AddBiasFn> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& /*anchor*/, int64_t bias_ptr,
                            int64_t queue) {
    ctx->saved_data["bias"] = bias_ptr;
    ctx->saved_data["queue"] = queue;
    return x + reinterpret_cast<const Param*>(bias_ptr)->value;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto* bias = unpack<const Param>(ctx, "bias");
    if (bias->trainable()) submit(ctx, [bias, dy = rows_of(grads[0])] { add_bias_grad(*bias, dy); });
    return {grads[0], {}, {}, {}};
  }
};

struct EmbeddingFn : Function<EmbeddingFn> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& /*anchor*/, const at::Tensor& ids,
                            int64_t table_ptr, int64_t queue) {
    ctx->saved_data["table"] = table_ptr;
    ctx->saved_data["queue"] = queue;
    ctx->save_for_backward({ids});
    return reinterpret_cast<const Param*>(table_ptr)->value.index_select(0, ids);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto* table = unpack<const Param>(ctx, "table");
    const at::Tensor ids = ctx->get_saved_variables()[0], dy = grads[0];
    submit(ctx, [table, ids, dy] {
      at::Tensor grad = table->main_grad;
      const at::Tensor rows = dy.to(grad.scalar_type());
      if (grad.is_cuda()) {
        grad.index_put_({ids}, rows,
                        /*accumulate=*/true);  // sorts, so the order of the sums is fixed; index_add_ is not
      } else {
        grad.index_add_(0, ids, rows);
      }
    });
    return {{}, {}, {}, {}};
  }
};

struct RmsNormFn : Function<RmsNormFn> {
  static std::tuple<at::Tensor, at::Tensor> compute(const at::Tensor& x, const Param& weight, double eps) {
    return x.is_cuda() ? at::_fused_rms_norm(x, {x.size(-1)}, weight.value, eps) : cpu::rms_norm(x, weight.value, eps);
  }
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& /*anchor*/, int64_t weight_ptr,
                            double eps, int64_t queue) {
    auto [y, rstd] = compute(x, *reinterpret_cast<const Param*>(weight_ptr), eps);
    ctx->saved_data["weight"] = weight_ptr;
    ctx->saved_data["queue"] = queue;
    ctx->save_for_backward({x, rstd});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto* weight = unpack<const Param>(ctx, "weight");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &rstd = saved[1], dy = grads[0].contiguous();
    at::Tensor dx, dw;
    if (x.is_cuda()) {
      std::tie(dx, dw) =
          at::_fused_rms_norm_backward(dy, x, {x.size(-1)}, rstd, weight->value, {true, weight->trainable()});
    } else {
      std::tie(dx, dw) = cpu::rms_norm_backward(dy, x, rstd, weight->value, weight->trainable());
    }
    if (weight->trainable()) submit(ctx, [weight, dw] { weight->main_grad.add_(dw); });
    return {dx, {}, {}, {}, {}};
  }
};

struct LayerNormFn : Function<LayerNormFn> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& /*anchor*/, int64_t weight_ptr,
                            int64_t bias_ptr, double eps, int64_t queue) {
    const auto& weight = *reinterpret_cast<const Param*>(weight_ptr);
    const auto& bias = *reinterpret_cast<const Param*>(bias_ptr);
    auto [y, mean, rstd] = at::native_layer_norm(x, {x.size(-1)}, weight.value, bias.value, eps);
    ctx->saved_data["weight"] = weight_ptr;
    ctx->saved_data["bias"] = bias_ptr;
    ctx->saved_data["queue"] = queue;
    ctx->save_for_backward({x, mean, rstd});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto* weight = unpack<const Param>(ctx, "weight");
    const auto* bias = unpack<const Param>(ctx, "bias");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    auto [dx, dw, db] =
        at::native_layer_norm_backward(grads[0].contiguous(), x, {x.size(-1)}, saved[1], saved[2], weight->value,
                                       bias->value, {true, weight->trainable(), bias->trainable()});
    if (weight->trainable()) submit(ctx, [weight, dw = dw] { weight->main_grad.add_(dw); });
    if (bias->trainable()) submit(ctx, [bias, db = db] { bias->main_grad.add_(db); });
    return {dx, {}, {}, {}, {}, {}};
  }
};

struct SwigluFn : Function<SwigluFn> {
  static at::Tensor compute(const at::Tensor& gate, const at::Tensor& up) {
    return cuda::fits(gate) ? cuda::swiglu(gate, up) : at::silu(gate).mul_(up);
  }
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
    return compute(gate, up);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1], &dy = grads[0];
    if (cuda::fits(gate)) {
      auto [dgate, dup] = cuda::swiglu_backward(dy, gate, up);
      return {dgate, dup};
    }
    return {at::silu_backward(dy * up, gate), at::silu(gate).mul_(dy)};
  }
};

// silu(a x) / a with a = 1.702 is x · sigmoid(a x), and its derivative is silu'(a x).
constexpr double kQuickGelu = 1.702;
struct QuickGeluFn : Function<QuickGeluFn> {
  static at::Tensor compute(const at::Tensor& x) {
    return cuda::fits(x) ? cuda::quick_gelu(x) : at::silu(x * kQuickGelu).mul_(1 / kQuickGelu);
  }
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return compute(x);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    return {cuda::fits(x) ? cuda::quick_gelu_backward(grads[0], x) : at::silu_backward(grads[0], x * kQuickGelu)};
  }
};

at::Tensor rotate(const at::Tensor& x_TND, const at::Tensor& cos_TF, const at::Tensor& sin_TF, bool inverse) {
  if (!x_TND.is_cuda()) return cpu::rotary(x_TND, cos_TF, sin_TF, inverse);
  if (cuda::fits(x_TND)) return cuda::rotary(x_TND, cos_TF, sin_TF, inverse);
  const at::Tensor cos = cos_TF.unsqueeze(1), sin = inverse ? sin_TF.unsqueeze(1).neg() : sin_TF.unsqueeze(1);
  const int64_t half = x_TND.size(2) / 2;
  const at::Tensor low = x_TND.narrow(2, 0, half), high = x_TND.narrow(2, half, half);
  // float32 cos and sin promote 16-bit halves to float32.
  return at::cat({at::addcmul(low * cos, high, sin, -1), at::addcmul(high * cos, low, sin)}, 2).to(x_TND.scalar_type());
}

struct RotaryFn : Function<RotaryFn> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    return rotate(x, cos, sin, false);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    return {rotate(grads[0].contiguous(), saved[0], saved[1], true), {}, {}};
  }
};

// Chunks of rows such that one chunk's logits stay near 64 MB in float32.
int64_t rows_a_chunk(int64_t vocab) { return std::max<int64_t>(1, (int64_t{16} << 20) / vocab); }

struct HeadLossFn : Function<HeadLossFn> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_RI, const at::Tensor& /*anchor*/,
                            int64_t weight_ptr, const at::Tensor& targets_R, double scale, int64_t queue, bool keep,
                            int64_t ranks_ptr) {
    const auto& weight = *reinterpret_cast<const Param*>(weight_ptr);
    const auto& ranks = *reinterpret_cast<const TensorParallel*>(ranks_ptr);
    const at::ScalarType acc = x_RI.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const int64_t rows = x_RI.size(0), vocab = weight.value.size(0), step = rows_a_chunk(weight.shape[0]);
    const int64_t begin_id = weight.part_range(weight.part.index).first;
    at::Tensor loss = at::zeros({}, x_RI.options().dtype(acc));
    at::Tensor dlogits_RV;  // scale · (softmax − one-hot), in the compute dtype
    if (keep) dlogits_RV = at::empty({rows, vocab}, x_RI.options());
    for (int64_t begin = 0; begin < rows; begin += step) {
      const int64_t count = std::min(step, rows - begin);
      const at::Tensor logits = at::linear(x_RI.narrow(0, begin, count), weight.value).to(acc);
      const at::Tensor targets = targets_R.narrow(0, begin, count).unsqueeze(1);
      at::Tensor log_probs, of_targets;
      if (ranks.alone()) {
        log_probs = at::log_softmax(logits, 1);
        of_targets = log_probs.gather(1, targets);
      } else {
        std::tie(log_probs, of_targets) = ranks.log_softmax(logits, targets, begin_id);
      }
      loss.sub_(of_targets.sum());
      if (!keep) continue;
      at::Tensor grad = log_probs.exp();
      const at::Tensor own = (targets - begin_id).clamp(0, vocab - 1);
      grad.scatter_add_(1, own, (targets - begin_id).eq(own).to(acc).neg());
      dlogits_RV.narrow(0, begin, count).copy_(grad.mul_(scale));
    }
    ctx->saved_data["weight"] = weight_ptr;
    ctx->saved_data["queue"] = queue;
    if (keep) ctx->save_for_backward({x_RI, dlogits_RV});
    return loss.mul_(scale);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto* weight = unpack<const Param>(ctx, "weight");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor x = saved[0], d = saved[1], g = grads[0].to(x.scalar_type());
    if (weight->trainable()) {
      submit(ctx, [weight, d, xg = x * g] { add_weight_grad(*weight, d, xg); });
    }
    return {ctx->needs_input_grad(0) ? d.mm(weight->value).mul_(g) : at::Tensor(), {}, {}, {}, {}, {}, {}, {}};
  }
};

}  // namespace

void WeightGradQueue::submit(std::function<void()> work) {
  if (deferred_) {
    pending_.push_back(std::move(work));
    return;
  }
  at::NoGradGuard no_grad;
  work();
}

void WeightGradQueue::run() {
  at::NoGradGuard no_grad;
  for (auto& work : pending_) work();
  pending_.clear();
}

WeightGradScope::WeightGradScope(WeightGradQueue* queue) : previous_queue_(t_queue), previous_anchor_(t_anchor) {
  t_queue = queue;
  t_anchor = at::zeros({1}).requires_grad_(true);
}

WeightGradScope::~WeightGradScope() {
  t_queue = previous_queue_;
  t_anchor = previous_anchor_;
}

bool in_weight_grad_scope() { return t_queue != nullptr; }

at::Tensor linear(const at::Tensor& x_TI, const Param& weight, const Param* bias) {
  if (!at::GradMode::is_enabled()) {
    const at::Tensor b = bias ? bias->value : at::Tensor();
    // Inside a Segment the sums are made in the order that they have with a graph, so that recomputation changes no
    // bit.
    return t_queue == nullptr
               ? cpu::linear(x_TI, weight.value, b)
               : at::linear(x_TI, weight.value, b.defined() ? std::optional<at::Tensor>(b) : std::nullopt);
  }
  return LinearFn::apply(x_TI, anchor_for(weight, bias), pack(&weight), pack(bias), pack(t_queue));
}

at::Tensor add_bias(const at::Tensor& x_TO, const Param& bias) {
  return AddBiasFn::apply(x_TO, anchor_for(bias), pack(&bias), pack(t_queue));
}

std::vector<at::Tensor> linears(const at::Tensor& x_TI, absl::Span<const LinearWeights> weights) {
  std::vector<at::Tensor> out;
  if (at::GradMode::is_enabled() || t_queue != nullptr) {
    for (const LinearWeights& part : weights) out.push_back(linear(x_TI, *part.weight, part.bias));
    return out;
  }
  absl::InlinedVector<cpu::WeightBias, 4> values;
  for (const LinearWeights& part : weights) {
    values.push_back({part.weight->value, part.bias ? part.bias->value : at::Tensor()});
  }
  return cpu::linears(x_TI, values);
}

at::Tensor embedding(const at::Tensor& ids_T, const Param& table, const TensorParallel& ranks, const RowSplit& rows) {
  const auto look_up = [&](const at::Tensor& ids) {
    return at::GradMode::is_enabled() ? EmbeddingFn::apply(anchor_for(table), ids, pack(&table), pack(t_queue))
                                      : table.value.index_select(0, ids);
  };
  if (ranks.alone()) return look_up(ids_T);
  const auto [begin, end] = table.part_range(table.part.index);
  const at::Tensor ids = ids_T - begin;
  if (begin == end) {  // no rows to look in
    const at::Tensor none = ids.narrow(0, 0, 0), found = look_up(none);
    return ranks.sum_rows(at::zeros({ids.size(0), found.size(1)}, found.options()).index_copy(0, none, found), rows);
  }
  // Row 0 in place of the others' words, and zeros in place of that: how many are here no host has to wait for.
  const at::Tensor absent = at::logical_or(ids.lt(0), ids.ge(end - begin));
  const at::Tensor found = look_up(ids.masked_fill(absent, 0));
  return ranks.sum_rows(found.masked_fill(absent.unsqueeze(1), 0), rows);
}

at::Tensor rms_norm(const at::Tensor& x, const Param& weight, double eps) {
  // Without a graph the bookkeeping of a Function costs as much as a small kernel.
  if (!at::GradMode::is_enabled()) return std::get<0>(RmsNormFn::compute(x, weight, eps));
  return RmsNormFn::apply(x, anchor_for(weight), pack(&weight), eps, pack(t_queue));
}

at::Tensor layer_norm(const at::Tensor& x, const Param& weight, const Param& bias, double eps) {
  return LayerNormFn::apply(x, anchor_for(weight, &bias), pack(&weight), pack(&bias), eps, pack(t_queue));
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return at::GradMode::is_enabled() ? SwigluFn::apply(gate, up) : SwigluFn::compute(gate, up);
}
at::Tensor quick_gelu(const at::Tensor& x) {
  return at::GradMode::is_enabled() ? QuickGeluFn::apply(x) : QuickGeluFn::compute(x);
}
at::Tensor rotary(const at::Tensor& x_TND, const at::Tensor& cos_TF, const at::Tensor& sin_TF) {
  if (!at::GradMode::is_enabled()) return rotate(x_TND, cos_TF, sin_TF, false);
  return RotaryFn::apply(x_TND, cos_TF, sin_TF);
}

at::Tensor head_loss(const at::Tensor& x_RI, const Param& weight, const at::Tensor& targets_R, double scale,
                     const TensorParallel& ranks) {
  const bool keep = at::GradMode::is_enabled() && (x_RI.requires_grad() || weight.trainable());
  return HeadLossFn::apply(x_RI, anchor_for(weight), pack(&weight), targets_R, scale, pack(t_queue), keep,
                           pack(&ranks));
}

}  // namespace parvl
