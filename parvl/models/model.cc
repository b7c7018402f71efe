#include "parvl/models/model.h"

#include "parvl/base/check.h"

namespace parvl {

std::unique_ptr<Model> Model::create(const ModelSpec& spec) {
  switch (spec.family) {
    case Family::kLlama:
    case Family::kQwen2:
      return make_llama(spec);
    case Family::kQwen2Vl:
      return make_qwen2_vl(spec);
    case Family::kQwen25Vl:
      return make_qwen2_5_vl(spec);
  }
  PARVL_CHECK(false, "a family without a constructor");
  return nullptr;
}

RopePositions Model::positions(int64_t tokens, const std::vector<ImageSpan>&) const {
  RopePositions out;
  for (int64_t p = 0; p < tokens; ++p) out.at.push_back({p, p, p});
  out.next = tokens;
  return out;
}

Bundle run_pieces(const std::vector<Piece>& pieces, Bundle bundle) {
  at::NoGradGuard no_grad;
  for (const Piece& piece : pieces) bundle = piece.run(bundle);
  return bundle;
}

}  // namespace parvl
