// How many values the parameters of a model have, and which of them a rank holds, by formula. The tables of
// nn/param.h are what the code has; tests hold these formulas against them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/plan/model_spec.h"
#include "parvl/plan/pipeline/stages.h"

namespace parvl {

struct ValueCounts {
  int64_t vision_encoder = 0, projector = 0;
  int64_t layers = 0, layer = 0;  // decoder layers, and the values of one
  int64_t embedding = 0, norm = 0;
  int64_t head = 0;  // 0: tied to the embedding
  int64_t backbone() const { return layers * layer + embedding + norm + head; }
  int64_t total() const { return vision_encoder + projector + backbone(); }
};
// `align`: each tensor counts as a multiple of so many values; 64 as they lie in memory (ParamTable::allocate), 1 as an
// optimizer's flat tensors hold them.
ValueCounts value_counts(const ModelSpec& spec, int64_t align = 1);

// Of one stage. A tied output matrix that has no embedding beside it is a copy there.
int64_t stage_values(const ValueCounts& counts, const StagePart& part);

// A parameter without its tensors: the part of Param and Shard (nn/param.h) that formulas need.
struct ParamSpec {
  std::string module;          // "llm_backbone"
  std::string name;            // global: "llm_backbone.layers.0.attn.q.weight"
  std::vector<int64_t> shape;  // of the whole
  // Of tensor parallelism, as Shard: the dim that is cut (−1: every rank has the whole), in equal blocks that are each
  // cut between whole units (0: anywhere), which several ranks may share.
  int cut = -1;
  int64_t blocks = 1, units = 0;
  bool copies = false;
  int64_t layer = -1;  // of the backbone
  std::string tied;    // the name of the parameter that has the same tensor
  int64_t values() const;
  bool is_matrix() const { return shape.size() >= 2; }
};
// In the models' order, each tensor once.
std::vector<ParamSpec> list_params(const ModelSpec& spec);

// What tensor-parallel rank `rank` of `ranks` holds of a parameter: one of `parts` parts, which `copies` ranks have.
struct HeldPart {
  int64_t values = 0, parts = 1, copies = 1;
};
// InvalidArgument naming parameter and numbers where it cannot be cut so, as ParamTable::split.
absl::StatusOr<HeldPart> held_part(const ParamSpec& param, int64_t ranks, int64_t rank);
// Whether a stage holds a parameter of the backbone, by its global name ("llm_backbone.layers.0.attn.q.weight"). A tied
// embedding is on the first stage and on the last.
bool on_stage(std::string_view name, bool tied_embedding, const StagePart& part);
// Likewise of any module: those beside the backbone have no stages.
bool on_stage(const ParamSpec& param, const StagePart& part);

}  // namespace parvl
