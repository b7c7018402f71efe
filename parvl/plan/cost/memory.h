// Bytes that a model needs to answer requests, by formula. Weights and KV memory are exact; what a step computes with
// is an upper bound on the tensors that are alive at its worst moment, as the code of `nn`, `models` and `exec` makes
// them (tests/unit/exec_memory_test.cc counts them and holds the formulas against that).
#pragma once

#include <cstdint>
#include <optional>

#include "parvl/plan/model_spec.h"
#include "parvl/plan/pipeline/stages.h"

namespace parvl {

// Which of a model's modules a process holds.
struct HeldModules {
  bool encoder = true;  // with its projector: what passes between the two is never sent
  bool backbone = true;
};

struct WeightBytes {
  int64_t vision_encoder = 0;
  int64_t projector = 0;
  int64_t backbone = 0;
  int64_t total() const { return vision_encoder + projector + backbone; }
  int64_t of(const HeldModules& held) const {
    return (held.encoder ? vision_encoder + projector : 0) + (held.backbone ? backbone : 0);
  }
};
// As they lie in memory: each tensor begins at a multiple of 64 values, and a tied output matrix is there once.
WeightBytes weight_bytes(const ModelSpec& spec, DType dtype);

// One of the ranks that a backbone is cut over: a part of each matrix, of some of the layers.
struct BackboneRank {
  int64_t ranks = 1, rank = 0;     // that the matrices are cut over, and which of these it is
  std::optional<StagePart> stage;  // of a pipeline; without: all layers
};
// As weight_bytes of the backbone; the ranks must be ones that it can be cut over.
int64_t backbone_bytes(const ModelSpec& spec, DType dtype, const BackboneRank& rank);
// What a rank computes with: its layers, and in each its query heads, its key heads and its columns of the MLP.
BackboneSpec rank_backbone(BackboneSpec spec, const BackboneRank& rank);

// Keys and values of one token in all layers.
int64_t kv_bytes_a_token(const BackboneSpec& spec, DType dtype);
// What the projector gives the backbone for an image of so many patches; what the encoder cache keeps.
int64_t visual_bytes(const ModelSpec& spec, DType dtype, int64_t patches);

// Where tensors are computed.
struct Target {
  bool cuda = false;
  int64_t threads = 1;  // of the CPU
};

// One step of the backbone.
struct StepShape {
  int64_t tokens = 0;           // of all sequences together
  int64_t longest_piece = 0;    // the most tokens of one sequence
  int64_t longest_context = 0;  // the most tokens that a sequence has in the end, those in its pages included
  int64_t visual_tokens = 0;    // of `tokens`
  int64_t sampled = 0;          // sequences whose next token is chosen: each has a row of logits
  int64_t ranks = 1;            // that the backbone is cut over
};
// On the target's memory, of one rank.
int64_t step_bytes(const BackboneSpec& spec, DType dtype, const StepShape& shape, const Target& target);
// Of the CPU, beside the rows of logits themselves: what choosing from them copies, and keeps until a request ends.
int64_t sampling_bytes(const BackboneSpec& spec, int64_t sampled);
// The vision encoder and projector on one image of so many patches, its output included.
int64_t encode_bytes(const ModelSpec& spec, DType dtype, int64_t patches, const Target& target);

}  // namespace parvl
