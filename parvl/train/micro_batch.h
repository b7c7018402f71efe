// Some sequences with their images, ready for the model's pieces; and these pieces as Segments.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parvl/models/packing.h"
#include "parvl/train/run_ranks.h"

namespace parvl {

// What forward and backward of some sequences need.
struct MicroBatch {
  at::Device device = at::kCPU;
  PackedBatch packed;       // of an encoder's own rank the images alone
  std::vector<Grid> grids;  // of all images of the sequences
  // With the images dealt out over ranks (`packed` has this rank's): who has what; and, where these are the replica's,
  // them.
  std::optional<VisionShare> share;
  TensorParallel replica;
};
// All ranks of a replica make it of the same sequences, and so does an encoder's own rank. `encoders`: the group of
// encoder ranks of each of grids_of, where it has ranks of its own.
MicroBatch make_micro_batch(const Model& model, const std::vector<SequenceInput>& sequences, at::Device device,
                            const RunRanks& ranks, const std::vector<int64_t>& encoders = {});

// From what it puts into `bundle` to "visual", for a batch that has images: of those that are encoded here.
std::vector<Piece> vision_pieces(const Model& model, const MicroBatch& batch, Bundle& bundle);
// "visual" of a rank that encodes no image.
Bundle no_visual(const Model& model, at::Device device);
// Every rank's "visual" to all ranks of the replica, in the order of the batch's images. Where `batch.share` is set.
// With an encoder on ranks of its own, whose rows came as messages, only the order.
Piece exchange_piece(const MicroBatch& batch);

// Whether a piece reads any trained parameter, also where another rank holds it.
bool has_trained_params(const ParamTable& params, const Piece& piece);

// Pieces in the order of the forward, with what each needs a graph for. That follows from the freeze plan alone, so a
// rank without images has the same borders as the others, and frozen modules before the first trained one keep no
// graph.
class SegmentList {
 public:
  // `recompute` keeps only each piece's input and runs it again in the backward. `params` is borrowed.
  SegmentList(const ParamTable& params, bool recompute) : params_(params), recompute_(recompute) {}

  void add(Piece piece);
  void add(std::vector<Piece> pieces);
  // As vision_pieces.
  void add_vision(const Model& model, const MicroBatch& batch, Bundle& bundle);
  // What comes before the next piece runs elsewhere: whether any of it is trained.
  void starts_after(bool trained) { trained_before_ = trained_before_ || trained; }
  std::vector<Segment> take() { return std::move(segments_); }

 private:
  const ParamTable& params_;
  bool recompute_, trained_before_ = false;
  std::vector<Segment> segments_;
};

}  // namespace parvl
