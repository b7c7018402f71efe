// What an engine is asked to generate, and whom it tells.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/base/timeline.h"
#include "parvl/exec/generation.h"
#include "parvl/media/grammar.h"
#include "parvl/media/prompt.h"

namespace parvl {

struct EngineRequest {
  std::shared_ptr<const Prompt> prompt;
  SamplingParams sampling;
  // Of an answer that goes on from elsewhere, its tokens so far. They count in every limit and penalty; what is given
  // out, and the result, begin after them.
  std::vector<TokenId> generated;
  std::shared_ptr<const Grammar> grammar;  // of Engine::grammars(); null: any text
  int priority = 0;                        // a lower number goes first
  std::string cache_salt;                  // requests of different salts share no prefix
  TrackId track;                           // where EngineConfig::timeline shows it
  // Both on the engine's thread; they must not block. `on_end` comes exactly once and last, also for a cancelled
  // request (finish kNone) and when the engine stops.
  std::function<void(const TokenEvent&)> on_token;
  std::function<void(const absl::StatusOr<GenerateResult>&)> on_end;
};

}  // namespace parvl
