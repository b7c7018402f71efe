// A backbone on the stages of a pipeline: whose parameters and pieces are where.
#pragma once

#include <vector>

#include "parvl/nn/param.h"
#include "parvl/nn/segment.h"
#include "parvl/plan/cost/values.h"

namespace parvl {

// Whether a stage holds a parameter of the backbone.
bool on_stage(const Param& param, bool tied_embedding, const StagePart& part);
// Of a backbone's pieces, the embedding and then the layers, those of one stage.
std::vector<Piece> stage_pieces(std::vector<Piece> backbone, const StagePart& part);

}  // namespace parvl
