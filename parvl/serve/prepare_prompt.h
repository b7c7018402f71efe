// A request's messages and images, or its texts → the prompts that the engine takes. Runs on a worker thread: it
// fetches, decodes and resizes.
#pragma once

#include <memory>
#include <stop_token>
#include <string>
#include <vector>

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

using ProcessedImages = std::vector<std::shared_ptr<const ProcessedImage>>;

// Thread-safe. Errors are answers' statuses: 400 over the context (naming the limit), 413 an image over a cap, 422 an
// image that cannot be fetched, read or decoded (naming the item), the chat template's own refusals (400), and 503 when
// stopped or when a process that decodes was.
struct PromptMaker {
  const PromptBuilder& prompts;
  const PromptLimits& limits;
  const MediaPolicy& policy;
  std::stop_token stop = {};  // ends what is being fetched, and comes before the next image
  bool only_counts = false;   // a text over the context is no error, up to 1 MiB

  // A chat's text and its images may be made side by side; place() puts them together.
  absl::StatusOr<PromptText> write_chat(const GenerateRequest& request, PromptOptions options = {}) const;
  absl::StatusOr<ProcessedImages> load_images(const GenerateRequest& request) const;
  absl::StatusOr<Prompt> place(PromptText text, ProcessedImages images) const;
  absl::StatusOr<Prompt> prepare_chat(const GenerateRequest& request, const PromptOptions& options = {}) const;
  // One for each plain prompt.
  absl::StatusOr<std::vector<Prompt>> prepare_plain(const GenerateRequest& request) const;
  // A text as it is, which may name special tokens: who may write the whole prompt may write these too.
  // `add_special_tokens`: with the tokens that the tokenizer puts around a text. May be over the context, but not far.
  absl::StatusOr<std::vector<TokenId>> tokens_of(const std::string& text, bool add_special_tokens = true) const;

 private:
  absl::Status check_text(size_t bytes, Api api) const;
  absl::StatusOr<Prompt> prepare_one(const PlainPrompt& plain, const std::string& suffix,
                                     const std::string& name) const;
};

}  // namespace parvl
