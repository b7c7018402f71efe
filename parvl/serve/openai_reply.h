// What a chat completion looks like on the wire. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parvl/base/json.h"
#include "parvl/media/tokenizer.h"
#include "parvl/sched/sampling.h"

namespace parvl {

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
};

// One completion's unchanging part.
class CompletionFormat {
 public:
  // `include_usage`: chunks carry "usage": null, as OpenAI's do when usage was asked for.
  CompletionFormat(std::string id, std::string model, int64_t created, bool include_usage)
      : id_(std::move(id)), model_(std::move(model)), created_(created), include_usage_(include_usage) {}

  // Server-sent events ("data: {...}\n\n"). `logprobs`: null, or what logprob_entries gave.
  std::string role_event() const;
  std::string content_event(const std::string& text, const Json& logprobs) const;
  std::string finish_event(FinishReason reason) const;
  std::string usage_event(const Usage& usage) const;

  std::string completion(const std::string& text, const Json& logprobs, FinishReason reason, const Usage& usage) const;

 private:
  std::string chunk_event(Json choices, Json usage) const;

  std::string id_, model_;
  int64_t created_;
  bool include_usage_;
};

inline constexpr char kDoneEvent[] = "data: [DONE]\n\n";
// `event: error` with the error object as data.
std::string error_event(const std::string& error_body);

// {"token", "logprob", "bytes", "top_logprobs"} for one token.
Json logprob_entry(const TokenLogprob& logprob, const Tokenizer& tokenizer);

}  // namespace parvl
