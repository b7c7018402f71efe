// A request's messages and images → the prompt a generator takes. Runs on a worker thread: it decodes and resizes.
#pragma once

#include "parvl/base/status.h"
#include "parvl/exec/engine.h"
#include "parvl/serve/openai_request.h"
#include "parvl/serve/options.h"

namespace parvl {

// What stays the same for every request of one loaded model.
struct PromptLimits {
  int64_t max_model_len = 0;
  size_t longest_token_bytes = 1;  // so that text far over the limit is refused before it is tokenised
};
PromptLimits prompt_limits(const Engine& engine);

// Thread-safe. Errors are answers' statuses: 400 over the context (naming the limit), 413 an image over a cap, 422 an
// image that cannot be read or decoded (naming the item), and the chat template's own refusals (400).
absl::StatusOr<Prompt> prepare_prompt(const GenerateRequest& request, const PromptBuilder& prompts,
                                      const PromptLimits& limits, const MediaPolicy& policy);

}  // namespace parvl
