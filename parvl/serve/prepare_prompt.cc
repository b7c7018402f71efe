#include "parvl/serve/prepare_prompt.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "parvl/serve/api_error.h"
#include "parvl/serve/media_source.h"

namespace parvl {
namespace {

constexpr size_t kMaxCountedBytes = 1u << 20;  // of a text over the context, where only its tokens are asked for

absl::Status over_the_context(const std::string& what, int64_t max_model_len, Api api) {
  const bool chat = api == Api::kChat;
  return api_error(400,
                   absl::StrCat(what, ", but the context is limited to ", max_model_len,
                                " tokens, one of them for the answer (--max-model-len); ",
                                chat ? "shorten the messages or send fewer or smaller images" : "shorten the prompt"),
                   "context_length_exceeded", chat ? "messages" : "prompt");
}

// Text far over the limit is refused before it is tokenised.
absl::Status check_text_bytes(size_t bytes, const PromptLimits& limits, Api api) {
  const int64_t at_least = static_cast<int64_t>(bytes / limits.longest_token_bytes);
  if (at_least < limits.max_model_len) return absl::OkStatus();
  return over_the_context(
      absl::StrCat(api == Api::kChat ? "the messages have" : "the prompt has", " at least ", at_least, " tokens"),
      limits.max_model_len, api);
}

absl::Status check_length(const std::string& name, const Prompt& prompt, const PromptLimits& limits, Api api) {
  const int64_t length = static_cast<int64_t>(prompt.ids.size());
  if (length < limits.max_model_len) return absl::OkStatus();
  return over_the_context(absl::StrCat(name, " has ", length, " tokens"), limits.max_model_len, api);
}

// 413 over a cap, 422 for what is broken; what failed on our side stays what it is.
absl::Status media_error(const absl::Status& status, const std::string& name, const std::string& where) {
  const std::string message = absl::StrCat(name, " cannot be decoded: ", status.message());
  if (absl::IsResourceExhausted(status)) return api_error(413, message, "media_too_large", where);
  if (absl::IsInvalidArgument(status)) return api_error(422, message, "media_unreadable", where);
  if (absl::IsUnavailable(status)) return api_error(503, message, "media_worker_lost");
  if (absl::IsAborted(status)) return api_error(503, message, "no_pixel_memory");
  return status;
}

// The model's image processor with the request's sizes.
absl::StatusOr<ImageProcessor> processor_for(const PixelRange& pixels, const ImageProcessor& of_model,
                                             int64_t max_model_len) {
  ImageProcessorConfig config = of_model.config();
  if (pixels.min_pixels > 0) config.min_pixels = pixels.min_pixels;
  if (pixels.max_pixels > 0) config.max_pixels = pixels.max_pixels;
  const bool changed = pixels.min_pixels > 0 || pixels.max_pixels > 0;
  if (changed && !config.do_resize) {
    return api_error(400, "mm_processor_kwargs: this model's image processor does not resize, so leave them out", "",
                     "mm_processor_kwargs");
  }
  if (config.min_pixels > config.max_pixels) {
    return api_error(400,
                     absl::StrCat("mm_processor_kwargs: min_pixels (", config.min_pixels,
                                  ") must not be above max_pixels (", config.max_pixels, ")"),
                     "", "mm_processor_kwargs");
  }
  const int64_t side = int64_t{config.patch_size} * config.merge_size;
  if (const int64_t least = config.min_pixels / (side * side); pixels.min_pixels > 0 && least >= max_model_len) {
    return api_error(
        400,
        absl::StrCat("mm_processor_kwargs: min_pixels ", config.min_pixels, " makes an image at least ", least,
                     " tokens, but the context is limited to ", max_model_len, " tokens (--max-model-len); lower it"),
        "context_length_exceeded", "mm_processor_kwargs");
  }
  return ImageProcessor(std::move(config));
}

}  // namespace

PromptLimits prompt_limits(const Engine& engine) {
  PromptLimits limits;
  limits.max_model_len = engine.max_model_len();
  const Tokenizer& tokenizer = engine.prompts().tokenizer();
  for (TokenId id = 0; id < tokenizer.vocab_size(); ++id) {
    limits.longest_token_bytes = std::max(limits.longest_token_bytes, tokenizer.token_bytes(id).size());
  }
  return limits;
}

absl::Status PromptMaker::check_text(size_t bytes, Api api) const {
  return only_counts && bytes <= kMaxCountedBytes ? absl::OkStatus() : check_text_bytes(bytes, limits, api);
}

absl::StatusOr<PromptText> PromptMaker::write_chat(const GenerateRequest& request, PromptOptions options) const {
  size_t text_bytes = 0;
  for (const Message& message : request.messages) {
    for (const ContentPart& part : message.content) text_bytes += part.text.size();
    for (const ToolCall& call : message.tool_calls) text_bytes += call.arguments.dump().size();
  }
  if (!request.tools.is_null()) text_bytes += request.tools.dump().size();
  PARVL_RETURN_IF_ERROR(check_text(text_bytes, Api::kChat));
  options.tools = request.tools;
  absl::StatusOr<PromptText> text = prompts.write(request.messages, request.images.size(), options);
  if (!text.ok()) return with_field(text.status(), "messages");
  return text;
}

absl::StatusOr<ProcessedImages> PromptMaker::load_images(const GenerateRequest& request) const {
  ProcessedImages images;
  if (request.images.empty()) return images;
  PARVL_ASSIGN_OR_RETURN(const ImageProcessor processor,
                         processor_for(request.pixels, prompts.image_processor(), limits.max_model_len));
  MediaFetcher fetcher(policy, stop);
  int64_t tokens = 0;
  for (size_t i = 0; i < request.images.size(); ++i) {
    const MediaReference& reference = request.images[i];
    if (stop.stop_requested()) return api_error(503, "the request was over before all its images were decoded");
    const std::string name = absl::StrCat("image ", i + 1, " of ", request.images.size(), " (", reference.where, ")");
    absl::StatusOr<std::string> bytes = load_media(reference.url, policy, name, fetcher);
    if (!bytes.ok()) return with_field(bytes.status(), reference.where);
    absl::StatusOr<ProcessedImage> processed = policy.images->prepare(*bytes, policy.image, processor);
    if (!processed.ok()) return media_error(processed.status(), name, reference.where);
    tokens += processed->num_tokens();
    if (tokens >= limits.max_model_len) {  // before the pixels of all of them fill the memory
      return over_the_context(absl::StrCat("the images up to number ", i + 1, " need ", tokens, " tokens"),
                              limits.max_model_len, Api::kChat);
    }
    images.push_back(std::make_shared<const ProcessedImage>(std::move(*processed)));
  }
  return images;
}

absl::StatusOr<Prompt> PromptMaker::place(PromptText text, ProcessedImages images) const {
  PARVL_ASSIGN_OR_RETURN(Prompt prompt, prompts.place(std::move(text), std::move(images)));
  if (!only_counts) PARVL_RETURN_IF_ERROR(check_length("the prompt", prompt, limits, Api::kChat));
  return prompt;
}

absl::StatusOr<Prompt> PromptMaker::prepare_chat(const GenerateRequest& request, const PromptOptions& options) const {
  PARVL_ASSIGN_OR_RETURN(PromptText text, write_chat(request, options));
  PARVL_ASSIGN_OR_RETURN(ProcessedImages images, load_images(request));
  return place(std::move(text), std::move(images));
}

absl::StatusOr<std::vector<TokenId>> PromptMaker::tokens_of(const std::string& text, bool add_special_tokens) const {
  PARVL_RETURN_IF_ERROR(check_text(text.size(), Api::kCompletions));
  const Tokenizer& tokenizer = prompts.tokenizer();
  return add_special_tokens ? tokenizer.encode_with_prefix(text, true) : tokenizer.encode(text, true);
}

absl::StatusOr<Prompt> PromptMaker::prepare_one(const PlainPrompt& plain, const std::string& suffix,
                                                const std::string& name) const {
  Prompt prompt;
  if (const auto* ids = std::get_if<std::vector<TokenId>>(&plain)) {
    prompt.ids = *ids;
  } else if (!suffix.empty()) {
    const std::string texts[] = {std::get<std::string>(plain), suffix, ""};
    for (size_t part = 0; part < std::size(texts); ++part) {
      prompt.ids.push_back(prompts.tokenizer().id_of(kFillInTokens[part]));
      PARVL_ASSIGN_OR_RETURN(const std::vector<TokenId> ids, tokens_of(texts[part], false));
      prompt.ids.insert(prompt.ids.end(), ids.begin(), ids.end());
    }
  } else {
    PARVL_ASSIGN_OR_RETURN(prompt.ids, tokens_of(std::get<std::string>(plain)));
  }
  if (prompt.ids.empty()) return api_error(400, name + " is empty; it needs at least one token", "", "prompt");
  if (std::find(prompt.ids.begin(), prompt.ids.end(), prompts.image_token()) != prompt.ids.end()) {
    return api_error(400, name + " holds the placeholder of an image; send images to /v1/chat/completions", "",
                     "prompt");
  }
  PARVL_RETURN_IF_ERROR(check_length(name, prompt, limits, Api::kCompletions));
  return prompt;
}

absl::StatusOr<std::vector<Prompt>> PromptMaker::prepare_plain(const GenerateRequest& request) const {
  std::vector<Prompt> made;
  const size_t count = request.prompts.size();
  for (size_t i = 0; i < count; ++i) {
    const std::string name = count == 1 ? "the prompt" : absl::StrCat("prompt ", i + 1, " of ", count);
    PARVL_ASSIGN_OR_RETURN(Prompt prompt, prepare_one(request.prompts[i], request.suffix, name));
    made.push_back(std::move(prompt));
  }
  return made;
}

}  // namespace parvl
