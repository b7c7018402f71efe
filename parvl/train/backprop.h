// One micro batch forward and backward, as an explicit list of Segments.
#pragma once

#include "parvl/models/packing.h"

namespace parvl {

// Whether a piece reads any trained parameter.
bool has_trained_params(const ParamTable& params, const Piece& piece);

// Adds d(scale · Σ cross-entropy of the targets)/d(parameter) into every trained parameter's main_grad and returns that
// scaled loss (a scalar on the device, float32 or float64). Frozen modules before the first trained one keep no graph.
// `recompute` keeps only each piece's input and runs it again in the backward. A batch without targets changes nothing
// and returns 0.
at::Tensor forward_backward(const Model& model, const PackedBatch& batch, double scale, bool recompute);

}  // namespace parvl
