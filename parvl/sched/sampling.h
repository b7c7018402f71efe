// How the next token is chosen, and why a generation ended. Plain data.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "parvl/base/ids.h"

namespace parvl {

// The fields of the OpenAI API and vLLM with the same names and meanings.
struct SamplingParams {
  double temperature = 1.0;  // 0: greedy
  double top_p = 1.0;        // (0, 1]
  int64_t top_k = 0;         // 0 or -1: off
  double min_p = 0.0;        // [0, 1]
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  double repetition_penalty = 1.0;  // over prompt and output, as transformers defines it
  std::map<TokenId, double> logit_bias;
  uint64_t seed = 0;
  int64_t max_tokens = -1;  // -1: up to the context
  int64_t min_tokens = 0;   // no end token and no stop string before this many
  std::vector<std::string> stop;
  std::vector<TokenId> stop_token_ids;
  bool ignore_eos = false;
  bool logprobs = false;
  int64_t top_logprobs = 0;
};

struct TokenLogprob {
  TokenId token_id = 0;
  float logprob = 0;                           // log-softmax of the logits before temperature, bias and penalties
  std::vector<std::pair<TokenId, float>> top;  // the `top_logprobs` most likely, most likely first
};

enum class FinishReason { kNone, kStop, kLength };
const char* to_string(FinishReason reason);  // "", "stop", "length"

}  // namespace parvl
