// What an engine is asked to generate, and whom it tells.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/base/timeline.h"
#include "parvl/exec/encoded_source.h"
#include "parvl/exec/generation.h"
#include "parvl/exec/kv_source.h"
#include "parvl/media/grammar.h"
#include "parvl/media/prompt.h"

namespace parvl {

struct EngineRequest {
  std::shared_ptr<const Prompt> prompt;
  SamplingParams sampling;
  // Of an answer that goes on from elsewhere, its tokens so far. They count in every limit and penalty; what is given
  // out, and the result, begin after them.
  std::vector<TokenId> generated;
  // By image index, as far as it reaches: where the image's encoder output lies, kept until the request ends. Such an
  // image needs no patches here, but its key. It is fetched when its turn to be encoded comes, unless its features are
  // here already. Null: this engine encodes it.
  std::vector<std::shared_ptr<EncodedSource>> encoded;
  std::shared_ptr<EncodedSource> source_of(int image_index) const {
    const size_t index = static_cast<size_t>(image_index);
    return index < encoded.size() ? encoded[index] : nullptr;
  }
  // Where the keys and values of its first tokens lie, all but the last of prompt and `generated` at most; null:
  // nowhere. They are fetched when its turn comes. Its images then need neither patches nor encoder output, only keys;
  // where what was fetched has to be computed again, and they have neither, it ends with Unavailable.
  std::shared_ptr<KvSource> kv;
  // Of Engine::kv_layout(tokens of prompt and `generated`): it ends with its first token, and if that does not end the
  // answer, its keys and values up to that lie here (GenerateResult::handed_over). Null: it goes on.
  std::shared_ptr<KvRoom> kv_room;
  std::shared_ptr<const Grammar> grammar;  // of Engine::grammars(); null: any text
  int priority = 0;                        // a lower number goes first
  std::string cache_salt;                  // requests of different salts share no prefix
  TrackId track;                           // where EngineConfig::timeline shows it
  // Both on the engine's thread, which holds none of its locks meanwhile: they may take one under which others submit
  // and cancel. They must not block. `on_end` comes exactly once and last, also for a cancelled request (finish kNone)
  // and when the engine stops.
  std::function<void(const TokenEvent&)> on_token;
  std::function<void(const absl::StatusOr<GenerateResult>&)> on_end;
};

}  // namespace parvl
