// What a generation gives, token by token and at its end.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "parvl/sched/sampling.h"

namespace parvl {

struct TokenEvent {
  TokenId token_id = 0;
  // What may be shown now: whole UTF-8 characters, nothing of a stop string or its possible beginning.
  std::string text;
  TokenLogprob logprob;  // filled when asked for
  FinishReason finish = FinishReason::kNone;
};

struct GenerateResult {
  std::vector<TokenId> token_ids;  // the end token included when it ended the text
  std::string text;
  std::vector<TokenLogprob> logprobs;
  FinishReason finish = FinishReason::kNone;
  bool handed_over = false;  // it is to go on elsewhere: see EngineRequest::kv_room
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of them, those whose keys and values were there already
  double queue_ms = 0;        // from the call to the start of the first encoding or step for it
  double encode_ms = 0;       // vision encoder and projector, of the images that were not there already
  double fetch_ms = 0;        // bringing here what was encoded or computed elsewhere
  double prefill_ms = 0;      // from the start of the first step that holds a part of it to the first token
  double overlap_ms = 0;      // of encode_ms, what passed within prefill_ms
  double ttft_ms = 0;         // from the call to the first token
  // Which module ran where, when there is a choice.
  std::vector<std::pair<std::string, std::string>> ran_on;
  double tpot_ms = 0;  // mean time a token after the first; 0 with fewer than two tokens
};

}  // namespace parvl
