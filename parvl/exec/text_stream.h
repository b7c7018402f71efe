// From tokens to text that may be shown, and the reason to stop. Torch-free.
#pragma once

#include <absl/types/span.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/media/tokenizer.h"
#include "parvl/sched/sampling.h"

namespace parvl {

// One generation's output text. What it has given out is never taken back: bytes of an unfinished UTF-8 character and
// text that could still turn out to be the beginning of a stop string wait inside. The total text depends on the bytes
// alone, not on how they were cut into tokens. When several stop strings could match, the one that is complete first
// wins, and of those the longest. Not thread-safe.
class TextStream {
 public:
  struct Delta {
    std::string text;
    FinishReason finish = FinishReason::kNone;
  };

  // Reads stop, stop_token_ids, ignore_eos, min_tokens and max_tokens (-1: no end by length) of valid `params`.
  TextStream(const SamplingParams& params, absl::Span<const TokenId> end_tokens);

  // The next token, its bytes (Tokenizer::token_bytes) and whether they are hidden (Tokenizer::is_special). End and
  // stop tokens are never shown. `last`: the text must end with it, as an end token that a grammar asked for, whatever
  // min_tokens and ignore_eos say. Nothing may be pushed after a finish.
  Delta push(TokenId id, std::string_view bytes, bool hidden, bool last = false);

  // What still waits, for an end from outside (the context is full, or the caller gave up).
  std::string flush();

 private:
  // Knuth–Morris–Pratt over one stop string; `matched` is how much of it the text ends with.
  struct StopString {
    std::string text;
    std::vector<size_t> fallback;  // [n]: the longest proper prefix that the first n bytes end with
    size_t matched = 0;
    bool advance(char c);  // true when complete
  };

  bool ends_text(TokenId id) const;
  bool find_stop(std::string_view text);  // adds to held_; true when a stop string is complete, which it then cuts
  std::string release();                  // what no stop string can claim any more

  std::vector<StopString> stops_;
  std::vector<TokenId> end_tokens_;
  int64_t min_tokens_, max_tokens_;
  int64_t count_ = 0;
  bool finished_ = false;
  Utf8Stream utf8_;
  std::string held_;
};

}  // namespace parvl
