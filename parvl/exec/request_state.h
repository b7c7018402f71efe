// What the executor remembers of a request.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "parvl/exec/engine_request.h"
#include "parvl/exec/sampler.h"
#include "parvl/media/grammar.h"
#include "parvl/models/model.h"

namespace parvl {

// One request's tensors and choices. Its step's job is the only one that changes it.
struct RequestState {
  std::shared_ptr<const Prompt> prompt;
  std::vector<std::shared_ptr<EncodedSource>> sources;  // by media item; null: encoded here
  std::shared_ptr<KvSource> kv;                         // null: nothing is given
  std::shared_ptr<KvRoom> kv_room;                      // null: nothing is left for others
  std::vector<TokenId> tokens;                          // prompt and output
  RopePositions positions;                              // of the prompt
  Sampler sampler;
  std::optional<GrammarMatcher> grammar;
  std::vector<uint32_t> mask;  // of the step's token, when there is a grammar
  absl::Status mask_status;

  // Whether the GPU may choose the next token.
  bool is_plain() const { return sampler.is_plain() && !grammar.has_value(); }
  std::array<int64_t, 3> position(int64_t index) const {
    const int64_t known = static_cast<int64_t>(positions.at.size());
    if (index < known) return positions.at[static_cast<size_t>(index)];
    const int64_t after = positions.next + index - known;
    return {after, after, after};
  }
};

}  // namespace parvl
