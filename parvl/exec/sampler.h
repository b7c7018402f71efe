// Chooses the next token from one row of logits. Torch-free; O(vocabulary) work a token, never a full sort.
//
// Order, as in vLLM: min_tokens and logit_bias, repetition penalty, frequency and presence penalties, the mask of a
// grammar, temperature, min_p, top_k, top_p, then a draw among the tokens that are left. The draw is argmax(logit / T +
// Gumbel noise) where the noise is a pure function of (seed, position, token): a request that moves to another process
// or batch continues with the same tokens.
#pragma once

#include <absl/types/span.h>

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/sched/sampling.h"

namespace parvl {

// Limits on what a request may ask for; each is named in its error.
struct SamplingLimits {
  static constexpr double kMaxTemperature = 2.0;
  static constexpr double kMaxPenalty = 2.0;  // presence and frequency, both signs
  static constexpr double kMinRepetitionPenalty = 0.01, kMaxRepetitionPenalty = 10.0;
  static constexpr double kMaxBias = 100.0;  // both signs
  static constexpr size_t kMaxBiasEntries = 1024;
  static constexpr size_t kMaxStopStrings = 16;
  static constexpr size_t kMaxStopBytes = 1024;  // of one stop string
  static constexpr size_t kMaxStopTokens = 128;
  static constexpr int64_t kMaxTopLogprobs = 20;
};

// The status payload that carries the name of the field at fault, for callers that report it apart from the message.
inline constexpr char kFieldPayload[] = "parvl.field";
absl::Status field_error(const std::string& field, const std::string& message);

// One sentence naming the field and its valid range, or OK. `vocab_size` bounds token ids.
absl::Status validate_sampling(const SamplingParams& params, int64_t vocab_size);

// The Gumbel(0, 1) noise that sampling adds to logit / T of `token` at `position`.
double gumbel_noise(uint64_t seed, int64_t position, TokenId token);

// One generation's state: what was prompted and produced so far. Not thread-safe.
class Sampler {
 public:
  struct Choice {
    TokenId token_id = 0;
    TokenLogprob logprob;  // filled when params.logprobs
  };

  // `params` must be valid (validate_sampling). `end_tokens` are the model's; they are banned, with
  // params.stop_token_ids, while fewer than min_tokens tokens are out.
  Sampler(SamplingParams params, absl::Span<const TokenId> end_tokens, absl::Span<const TokenId> prompt);

  // The next token; its position is the number of tokens before it (prompt and output). Does not record it. Internal
  // when a logit is NaN or +infinity (a broken model must not look like an answer) or no token may be chosen. `mask`: a
  // bit a token that may be chosen (GrammarMatcher::fill), tokens beyond it may not; empty: all may. Where it leaves
  // only end tokens, min_tokens does not ban them.
  absl::StatusOr<Choice> choose(absl::Span<const float> logits, absl::Span<const uint32_t> mask = {});
  // Whether `choose` is now just the likeliest token, or a draw from the whole softmax, with at most its own logprob:
  // what kernels/decode_sample.h does on a GPU.
  bool is_plain() const;
  const SamplingParams& params() const { return params_; }
  int64_t position() const { return position_; }  // tokens so far, prompt and output

  // Records a token as produced.
  void accept(TokenId token);

  // What is left of the vocabulary for a draw: (token, logit after bias and penalties), unordered. For tests and
  // `choose`.
  struct Candidate {
    float logit;
    TokenId id;
    double weight;  // exp((logit - max) / T)
  };
  absl::StatusOr<absl::Span<const Candidate>> candidates(absl::Span<const float> logits,
                                                         absl::Span<const uint32_t> mask = {});

 private:
  bool edits_logits() const;
  bool below_min_tokens() const { return output_count_ < params_.min_tokens; }
  absl::Span<const float> edited(absl::Span<const float> logits, absl::Span<const uint32_t> mask);
  bool only_banned(absl::Span<const uint32_t> mask) const;
  void gather(absl::Span<const float> logits, float max);
  void keep_top_p();

  SamplingParams params_;
  std::vector<TokenId> banned_;       // end and stop tokens
  std::unordered_set<TokenId> seen_;  // prompt and output
  std::unordered_map<TokenId, int64_t> output_counts_;
  int64_t position_ = 0;
  int64_t output_count_ = 0;
  std::vector<float> edited_;
  std::vector<Candidate> candidates_;
};

// log-softmax of `token`, and of the `top` most likely (lowest id first among equals).
TokenLogprob token_logprob(absl::Span<const float> logits, TokenId token, int64_t top);

}  // namespace parvl
