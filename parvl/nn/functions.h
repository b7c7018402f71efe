// Differentiable operations whose weights are Param handles. The backward gives the input's gradient to autograd and
// adds the weight's gradient into Param::main_grad (or queues that work), so weights are never autograd leaves.
//
// Shapes: T tokens or patches (packed, no padding), I and O features in and out, N heads, D head size, V vocabulary.
// All are called with grad mode on inside a Segment, or with grad mode off when serving; with grad off they keep
// nothing. 16-bit values: matrix products in that type; norms, rotary, softmax and loss in float32 inside. A micro
// batch's weight gradient reaches float32 main_grad rounded to 16 bits once where PyTorch has no product with a float32
// result (matrix products on the CPU, LayerNorm); the sum over micro batches is float32 everywhere.
#pragma once

#include <ATen/ATen.h>
#include <absl/types/span.h>

#include <functional>
#include <vector>

#include "parvl/nn/param.h"

namespace parvl {

// The weight-gradient work of one Segment. Immediate: done inside backward. Deferred: kept until `run`, so that a
// schedule can send the input's gradient first. One backward at a time.
class WeightGradQueue {
 public:
  void set_deferred(bool deferred) { deferred_ = deferred; }
  void submit(std::function<void()> work);
  void run();
  bool empty() const { return pending_.empty(); }

 private:
  bool deferred_ = false;
  std::vector<std::function<void()>> pending_;
};

// Makes `queue` receive the weight gradients of operations called on this thread while the scope lives.
class WeightGradScope {
 public:
  explicit WeightGradScope(WeightGradQueue* queue);
  ~WeightGradScope();

 private:
  WeightGradQueue* previous_queue_;
  at::Tensor previous_anchor_;
};

// Whether this thread is inside such a scope.
bool in_weight_grad_scope();

// The handles of a linear's parameters: `weight` [O, I]; `bias` [O] or null.
struct LinearWeights {
  const Param* weight = nullptr;
  const Param* bias = nullptr;
};
// y_TO = x_TI · wᵀ + b. `weight` [O, I]; `bias` [O] or null.
at::Tensor linear(const at::Tensor& x_TI, const Param& weight, const Param* bias);
// x + bias in every row, for a bias that is not a linear's own.
at::Tensor add_bias(const at::Tensor& x_TO, const Param& bias);
// The same input against several weights (queries, keys and values, say); equal to calls of `linear`, but quicker for a
// few rows without a graph.
std::vector<at::Tensor> linears(const at::Tensor& x_TI, absl::Span<const LinearWeights> weights);
// Rows of `table` [V, O]. `ids_T` int64. With `table` cut over `ranks` by the vocabulary: of the T rows this rank's
// part of `rows`.
at::Tensor embedding(const at::Tensor& ids_T, const Param& table, const TensorParallel& ranks = {},
                     const RowSplit& rows = {});
// x / sqrt(mean(x²) + eps) · w over the last dim (Zhang & Sennrich, "Root mean square layer normalization", 2019).
at::Tensor rms_norm(const at::Tensor& x, const Param& weight, double eps);
at::Tensor layer_norm(const at::Tensor& x, const Param& weight, const Param& bias, double eps);
// silu(gate) · up (Shazeer, "GLU variants improve transformer", 2020).
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
// x · sigmoid(1.702 x) (Hendrycks & Gimpel, "Gaussian error linear units", 2016).
at::Tensor quick_gelu(const at::Tensor& x);
// Rotates pairs (i, i + D/2) of every head: x_TND by the angles whose cosines and sines are cos_TF, sin_TF, F = D/2,
// float32 or float64 (Su et al., "RoFormer", 2021; the half-split layout of Hugging Face checkpoints).
at::Tensor rotary(const at::Tensor& x_TND, const at::Tensor& cos_TF, const at::Tensor& sin_TF);
// scale · Σ over rows of −log softmax(x · wᵀ)[target], a scalar in float32 (float64 for float64 inputs). Works through
// the rows in chunks, so that beside the logits' gradient in the compute dtype no [rows, V] tensor exists. `targets_R`
// int64. No rows: a zero that still has the graph. With `weight` cut over `ranks` by the vocabulary each computes the
// logits of its own part; of these only the rows' maxima and sums are exchanged (Megatron's "vocab parallel" loss),
// every rank gets the whole loss, and the gradient of x is a part of the sum over ranks.
at::Tensor head_loss(const at::Tensor& x_RI, const Param& weight, const at::Tensor& targets_R, double scale,
                     const TensorParallel& ranks = {});

}  // namespace parvl
