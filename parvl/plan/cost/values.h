// How many values the parameters of a model have, by formula, part by part.
#pragma once

#include <cstdint>

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

}  // namespace parvl
