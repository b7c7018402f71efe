// A backbone over the stages of a pipeline: who holds what, and where gradients flow. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "parvl/base/status.h"

namespace parvl {

// What one stage holds.
struct StagePart {
  int64_t first_layer = 0, layers = 0;
  bool embedding = false;  // the first stage
  bool head = false;       // the last one: final norm, output matrix, loss. A tied output matrix is a copy there
  friend bool operator==(const StagePart&, const StagePart&) = default;
};

// `given`: the layers of each stage in order; empty: as even as they go. Then the stages just before the last one take
// a layer more where they do not divide: the last one has the head to compute, and under 1F1B stage s keeps the
// activations of stages − s micro batches, so an extra layer costs the less memory the later it stands.
// Given, the first and the last stage may have no layer, since they have the embedding and the head (a head of 150,000
// words is as much work as several layers); between them a stage without layers would only pass on and is refused.
// InvalidArgument: numbers that do not add up to `layers`, or not as many as there are stages; more stages than layers
// where none are given.
absl::StatusOr<std::vector<StagePart>> split_layers(int64_t layers, int64_t stages,
                                                    const std::vector<int64_t>& given = {});

// What the backward of one piece of a model computes; as SegmentOptions.
struct PieceBackward {
  bool input_grad = false;   // something before it is trained: it sends gradients upstream
  bool weight_grad = false;  // it holds trained parameters
  bool keeps_graph() const { return input_grad || weight_grad; }  // and receives gradients from the next piece
  friend bool operator==(const PieceBackward&, const PieceBackward&) = default;
};

// The freeze plan: `trained[i]` says whether piece i, in the order of the forward, holds trained parameters (a tied
// output matrix counts as trained where its copy is). Every rank computes it from the recipe, so that all make the same
// calls, whatever their samples hold.
std::vector<PieceBackward> plan_backward(const std::vector<bool>& trained);

}  // namespace parvl
