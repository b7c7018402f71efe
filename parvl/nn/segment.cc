#include "parvl/nn/segment.h"

#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/autograd.h>

#include "parvl/comm/comm_site.h"

namespace parvl {
namespace {

// Backward on this thread, also on a GPU, for which autograd has a thread of its own: all calls of a rank's groups come
// from one thread, which knows from where in the code.
class BackwardHere {
 public:
  BackwardHere() { state().set_multithreading_enabled(false); }
  ~BackwardHere() { state().set_multithreading_enabled(before_); }
  BackwardHere(const BackwardHere&) = delete;
  BackwardHere& operator=(const BackwardHere&) = delete;

 private:
  static c10::AutogradState& state() { return c10::AutogradState::get_tls_state(); }
  const bool before_ = state().get_multithreading_enabled();
};

}  // namespace

Bundle Segment::run_with_graph() {
  at::AutoGradMode grad(true);
  WeightGradScope scope(queue_.get());
  return piece_.run(leaves_);
}

Bundle Segment::forward(const Bundle& in) {
  const CommSite site(piece_.name);
  WeightGradScope scope(queue_.get());
  if (!wants_grad()) {
    at::NoGradGuard no_grad;
    return piece_.run(in);
  }
  leaves_ = {};
  for (const auto& [name, tensor] : in.entries()) {
    at::Tensor leaf = tensor.detach();
    if (options_.input_grad) leaf.requires_grad_(true);
    leaves_.set(name, leaf);
  }
  Bundle detached;
  if (options_.recompute) {
    at::NoGradGuard no_grad;
    detached = piece_.run(leaves_);
  } else {
    outputs_ = run_with_graph();
    for (const auto& [name, tensor] : outputs_.entries()) detached.set(name, tensor.detach());
  }
  return detached;
}

Bundle Segment::backward_input(const Bundle& grad_out, bool defer_weights) {
  if (!wants_grad()) return {};
  const CommSite backward("backward"), site(piece_.name);
  if (options_.recompute) outputs_ = run_with_graph();
  std::vector<at::Tensor> outputs, grads;
  for (const auto& [name, tensor] : outputs_.entries()) {
    if (!tensor.requires_grad()) continue;
    const at::Tensor grad = grad_out.find(name);
    outputs.push_back(tensor);
    // Zero where nothing came, so that ranks whose samples differ go through the same operations.
    grads.push_back(grad.defined() ? grad : at::zeros_like(tensor));
  }
  queue_->set_deferred(defer_weights);
  const BackwardHere here;
  if (!outputs.empty()) torch::autograd::backward(outputs, grads);
  outputs_ = {};
  Bundle grad_in;
  if (options_.input_grad) {
    for (const auto& [name, leaf] : leaves_.entries()) {
      if (leaf.grad().defined()) grad_in.set(name, leaf.grad());
    }
  }
  leaves_ = {};
  return grad_in;
}

void Segment::backward_weight() { queue_->run(); }

void Segment::release() {
  leaves_ = {};
  outputs_ = {};
}

}  // namespace parvl
