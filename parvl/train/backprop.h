// One micro batch forward and backward, as an explicit list of Segments.
#pragma once

#include <optional>
#include <vector>

#include "parvl/models/packing.h"
#include "parvl/train/run_ranks.h"

namespace parvl {

// Whether a piece reads any trained parameter.
bool has_trained_params(const ParamTable& params, const Piece& piece);

// What forward and backward of some sequences need.
struct MicroBatch {
  PackedBatch packed;
  std::vector<Grid> grids;  // of all images of the sequences
  // With the images dealt out over the replica's ranks (`packed` has this rank's): who has what, and these ranks.
  std::optional<VisionShare> share;
  TensorParallel replica;
};
// All ranks of a replica make it of the same sequences.
MicroBatch make_micro_batch(const Model& model, const std::vector<SequenceInput>& sequences, at::Device device,
                            const RunRanks& ranks);

// From what it puts into `bundle` to "visual", for a batch that has images.
std::vector<Piece> vision_pieces(const Model& model, const MicroBatch& batch, Bundle& bundle);

// Adds d(scale · Σ cross-entropy of the targets)/d(parameter) into every trained parameter's main_grad and returns that
// scaled loss (a scalar on the device, float32 or float64). Frozen modules before the first trained one keep no graph.
// `recompute` keeps only each piece's input and runs it again in the backward. A batch without targets changes nothing
// and returns 0. With a model that is cut over ranks all of them call it for the same sequences, get the same loss, and
// add their parts of the gradients; the calls that they make to each other follow from the batch and from what is frozen
// alone.
at::Tensor forward_backward(const Model& model, const MicroBatch& batch, double scale, bool recompute);

}  // namespace parvl
