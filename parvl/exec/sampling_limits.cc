// What a request may ask of the sampler; used for HTTP fields and command-line flags alike.
#include <absl/strings/cord.h>

#include <cmath>

#include "parvl/exec/sampler.h"
#include "parvl/media/tokenizer.h"

namespace parvl {
namespace {

// nullopt-like: OK when `value` is inside; `range` reads "between 0 and 2".
absl::Status check_range(const char* field, double value, double low, double high) {
  if (value >= low && value <= high) return absl::OkStatus();  // false for NaN
  return field_error(field, absl::StrCat(field, " must be between ", low, " and ", high, ", found ", value));
}

absl::Status check_token(const char* field, TokenId id, int64_t vocab_size) {
  if (id >= 0 && id < vocab_size) return absl::OkStatus();
  return field_error(
      field, absl::StrCat(field, " names token ", id, ", but token ids of this model run from 0 to ", vocab_size - 1));
}

absl::Status check_stops(const SamplingParams& params, int64_t vocab_size) {
  using Limits = SamplingLimits;
  if (params.stop.size() > Limits::kMaxStopStrings) {
    return field_error("stop", absl::StrCat("stop may hold at most ", Limits::kMaxStopStrings, " strings, found ",
                                            params.stop.size()));
  }
  for (const std::string& text : params.stop) {
    if (text.empty() || text.size() > Limits::kMaxStopBytes) {
      return field_error(
          "stop", absl::StrCat("a stop string must have 1 to ", Limits::kMaxStopBytes, " bytes, found ", text.size()));
    }
    Utf8Stream reader;
    if (std::string shown = reader.push(text); shown + reader.flush() != text) {
      return field_error("stop", "a stop string must be valid UTF-8");
    }
  }
  if (params.stop_token_ids.size() > Limits::kMaxStopTokens) {
    return field_error("stop_token_ids", absl::StrCat("stop_token_ids may hold at most ", Limits::kMaxStopTokens,
                                                      " ids, found ", params.stop_token_ids.size()));
  }
  for (TokenId id : params.stop_token_ids) PARVL_RETURN_IF_ERROR(check_token("stop_token_ids", id, vocab_size));
  return absl::OkStatus();
}

}  // namespace

absl::Status field_error(const std::string& field, const std::string& message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kFieldPayload, absl::Cord(field));
  return status;
}

absl::Status validate_sampling(const SamplingParams& params, int64_t vocab_size) {
  using Limits = SamplingLimits;
  PARVL_RETURN_IF_ERROR(check_range("temperature", params.temperature, 0, Limits::kMaxTemperature));
  if (!(params.top_p > 0 && params.top_p <= 1)) {
    return field_error("top_p", absl::StrCat("top_p must be above 0 and at most 1, found ", params.top_p));
  }
  if (params.top_k < -1) {
    return field_error("top_k", absl::StrCat("top_k must be at least 1, or 0 or -1 for off, found ", params.top_k));
  }
  PARVL_RETURN_IF_ERROR(check_range("min_p", params.min_p, 0, 1));
  PARVL_RETURN_IF_ERROR(
      check_range("presence_penalty", params.presence_penalty, -Limits::kMaxPenalty, Limits::kMaxPenalty));
  PARVL_RETURN_IF_ERROR(
      check_range("frequency_penalty", params.frequency_penalty, -Limits::kMaxPenalty, Limits::kMaxPenalty));
  PARVL_RETURN_IF_ERROR(check_range("repetition_penalty", params.repetition_penalty, Limits::kMinRepetitionPenalty,
                                    Limits::kMaxRepetitionPenalty));
  if (params.logit_bias.size() > Limits::kMaxBiasEntries) {
    return field_error("logit_bias", absl::StrCat("logit_bias may hold at most ", Limits::kMaxBiasEntries,
                                                  " tokens, found ", params.logit_bias.size()));
  }
  for (const auto& [id, bias] : params.logit_bias) {
    PARVL_RETURN_IF_ERROR(check_token("logit_bias", id, vocab_size));
    PARVL_RETURN_IF_ERROR(check_range("logit_bias", bias, -Limits::kMaxBias, Limits::kMaxBias));
  }
  if (params.max_tokens != -1 && params.max_tokens < 1) {
    return field_error("max_tokens", absl::StrCat("max_tokens must be at least 1, found ", params.max_tokens));
  }
  if (params.min_tokens < 0 || (params.max_tokens != -1 && params.min_tokens > params.max_tokens)) {
    return field_error("min_tokens",
                       absl::StrCat("min_tokens must be between 0 and max_tokens, found ", params.min_tokens));
  }
  PARVL_RETURN_IF_ERROR(check_stops(params, vocab_size));
  if (params.top_logprobs < 0 || params.top_logprobs > Limits::kMaxTopLogprobs) {
    return field_error("top_logprobs", absl::StrCat("top_logprobs must be between 0 and ", Limits::kMaxTopLogprobs,
                                                    ", found ", params.top_logprobs));
  }
  if (params.top_logprobs > 0 && !params.logprobs) {
    return field_error("top_logprobs", "top_logprobs needs logprobs to be true");
  }
  return absl::OkStatus();
}

}  // namespace parvl
