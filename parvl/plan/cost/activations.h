// Bytes of activations that a training rank keeps for the backward, by formula: what the pieces of nn and models save,
// counted as Korthikanti et al. do ("Reducing activation recomputation in large transformer models", 2022, section 4).
// Their layer keeps 34 bytes a token and hidden value in 16 bits; ours differs by grouped heads, a gated MLP and no
// dropout. What a piece needs only while it runs (temporaries, a chunk of logits) comes on top.
#pragma once

#include <cstdint>
#include <vector>

#include "parvl/plan/cost/traffic.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

// Of one decoder layer on T tokens, with H hidden, q and k values of queries and keys, I of the MLP, of which 1/t is on
// each of t ranks (that of rank 0; kept key heads are those repeated for the queries):
//   2 · T/t · H   its input and the one of its second norm
//   2 · T · H     the inputs of its first matrices, gathered
//   T · (3q + 2k)/t  rotated queries, keys and values; the output of attention, once more where sequences differ
//   3 · T · I/t   gate, up and their product
// values, with the norms' and the softmax's sums a row. With recomputation: its input, T/t · H.
int64_t layer_activations(const BackboneSpec& spec, int64_t tokens, const TensorCut& cut);

// Of one micro batch that is under way in a stage: its layers, the output that goes to the next, the images' embeddings
// and the tokens' angles. `pieces` as in backbone_tensor_traffic; those without a graph keep nothing.
int64_t stage_activations(const BackboneSpec& spec, const StagePart& part, const std::vector<PieceBackward>& pieces,
                          const MicrobatchRows& rows, const TensorCut& cut);

// Of the loss, from its forward to its backward, which follows at once: two rows of H and one of V/t values a token to
// learn; with recomputation all of it is there in the backward too.
int64_t loss_activations(const BackboneSpec& spec, const MicrobatchRows& rows, const TensorCut& cut);

// Of the patches that a rank's encoder group encodes, and the merged rows of its projector group, until the backward;
// `given`: merged rows of its own that it gives to the other ranks of the replica.
struct VisionRows {
  int64_t patches = 0, merged = 0, given = 0;
};
int64_t vision_activations(const ModelSpec& spec, const VisionRows& rows, const TensorCut& encoder,
                           const TensorCut& projector);

// What schedules hold (Narayanan et al., Megatron-LM, SC 2021, section 2.2: of 1F1B's stage s at most stages − s micro
// batches): `live` times one micro batch, with recomputation one layer beside them, and the loss on the last stage.
struct HeldActivations {
  int64_t microbatch = 0, live = 1;
  int64_t layer = 0;  // what a layer's backward makes again
  int64_t loss = 0;
  int64_t images = 0;  // of all micro batches that are held
  int64_t total() const { return live * microbatch + layer + loss + images; }
};

}  // namespace parvl
