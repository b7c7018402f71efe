#include "parvl/nn/stage.h"

#include <utility>

namespace parvl {

bool on_stage(const Param& param, bool tied_embedding, const StagePart& part) {
  return on_stage(param.name, tied_embedding, part);
}

std::vector<Piece> stage_pieces(std::vector<Piece> backbone, const StagePart& part) {
  std::vector<Piece> out;
  if (part.embedding) out.push_back(std::move(backbone[0]));
  for (int64_t layer = part.first_layer; layer < part.first_layer + part.layers; ++layer) {
    out.push_back(std::move(backbone[static_cast<size_t>(layer + 1)]));
  }
  return out;
}

}  // namespace parvl
