// A piece of a model with an explicit backward. Autograd lives only inside a Segment; between Segments there are
// detached tensors, so a pipeline, recomputation or the border encoder → LLM is an explicit list of calls.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parvl/nn/bundle.h"
#include "parvl/nn/functions.h"

namespace parvl {

// One block as a function of named tensors. What else it reads (positions, targets) is bound inside.
struct Piece {
  std::string name;
  std::vector<std::string> owns;  // prefixes of the names of the parameters it reads
  std::function<Bundle(const Bundle&)> run;
};

struct SegmentOptions {
  bool input_grad = true;   // whether anything before this piece is trained
  bool weight_grad = true;  // whether this piece has trained parameters
  bool recompute = false;   // keep only the input and run the piece again in backward
};

// For one piece and one micro batch: forward, then backward_input, then backward_weight (when deferred), then release.
// Not thread-safe.
class Segment {
 public:
  Segment(Piece piece, SegmentOptions options) : piece_(std::move(piece)), options_(options) {}

  // Detached outputs. Keeps the graph (or the input) when a gradient is wanted, nothing otherwise.
  Bundle forward(const Bundle& in);
  // Gradients of the inputs by name (empty unless input_grad); adds the weights' gradients, or keeps them back when
  // `defer_weights`. `grad_out` by the outputs' names; an output without one counts as zero.
  Bundle backward_input(const Bundle& grad_out, bool defer_weights = false);
  void backward_weight();  // what backward_input kept back
  void release();          // frees whatever is still held
  const std::vector<std::string>& owns() const { return piece_.owns; }

 private:
  Bundle run_with_graph();
  bool wants_grad() const { return options_.input_grad || options_.weight_grad; }

  Piece piece_;
  SegmentOptions options_;
  // The graph holds its address, so it stays where it is when a Segment is moved.
  std::unique_ptr<WeightGradQueue> queue_ = std::make_unique<WeightGradQueue>();
  Bundle leaves_;  // detached inputs, requiring grad when input_grad
  Bundle outputs_;
};

}  // namespace parvl
