// Floating-point operations of a model, by formula. A multiply and an add count as two.
#pragma once

#include <cstdint>
#include <vector>

#include "parvl/plan/model_spec.h"
#include "parvl/plan/pipeline/stages.h"

namespace parvl {

struct BatchShape {
  std::vector<int64_t> sequence_tokens;  // tokens of each sequence
  std::vector<int64_t> image_patches;    // patches of each image
  int64_t loss_tokens = 0;               // rows that go through the output matrix
};

// Of one forward pass: matrix products and attention (causal in the LLM: half of the square; full in the vision
// encoder; window attention counted as full in the layers that see the whole image only). Norms and activations are
// left out.
double forward_flops(const ModelSpec& spec, const BatchShape& shape);
// Its parts: the vision encoder and projector, and the layers of one stage of the backbone, with the output matrix
// where the head is.
double vision_forward_flops(const ModelSpec& spec, const std::vector<int64_t>& image_patches);
double stage_forward_flops(const BackboneSpec& spec, const StagePart& part, const BatchShape& shape);
// A training step: the backward costs twice the forward.
inline double training_flops(const ModelSpec& spec, const BatchShape& shape) { return 3 * forward_flops(spec, shape); }

}  // namespace parvl
