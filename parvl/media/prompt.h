// Messages → token ids with media in their places: chat template, tokenizer and image processor together.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/ordered_json.h"
#include "parvl/base/status.h"
#include "parvl/media/image_processor.h"
#include "parvl/media/tokenizer.h"
#include "parvl/media/tool_syntax.h"

namespace parvl {

struct ContentPart {
  enum class Kind { kText, kImage };
  Kind kind = Kind::kText;
  std::string text;      // kText
  int image_index = -1;  // kImage: index into the request's images
};

// A call of a tool, as an assistant's message of the past holds it.
struct ToolCall {
  std::string id;
  std::string name;
  OrderedJson arguments;  // an object
};

struct Message {
  std::string role;  // system, user, assistant, tool
  std::vector<ContentPart> content;
  std::vector<ToolCall> tool_calls = {};  // assistant
  std::string tool_call_id = {};          // tool: which call it answers
  std::string name = {};                  // tool: of the function
};

// Where an item's placeholder tokens stand in the prompt.
struct MediaSpan {
  int image_index = 0;
  int64_t begin = 0;   // token position
  int64_t length = 0;  // = ProcessedImage::num_tokens()
};

struct Prompt {
  std::vector<TokenId> ids;
  std::vector<MediaSpan> media;  // in order of position
  std::vector<uint8_t>
      is_target;  // per token: 1 where an assistant turn's token is learned (with its end-of-turn token)
  std::vector<std::shared_ptr<const ProcessedImage>> images;  // by image_index
};

// What of a chat's prompt can be made before its images are there: an image is one placeholder yet.
struct PromptText {
  std::vector<TokenId> ids;
  std::vector<uint8_t> is_target;  // per token, where asked for
  std::vector<int> image_order;    // which image each placeholder stands for
};

struct PromptOptions {
  bool add_generation_prompt = true;
  bool mark_targets = false;  // fill is_target (training)
  OrderedJson tools;          // functions that the model may call, as OpenAI's API lists them; null: none
  Json template_arguments;    // further variables for the template, an object or null
};

// Immutable after load; thread-safe.
class PromptBuilder {
 public:
  // Reads tokenizer.json, tokenizer_config.json, chat_template.jinja (or the one inside tokenizer_config.json),
  // preprocessor_config.json (absent: no images) and config.json (the image token id) of a Hugging Face
  // directory.
  static absl::StatusOr<std::shared_ptr<const PromptBuilder>> load(const std::string& dir);
  ~PromptBuilder();

  const Tokenizer& tokenizer() const;
  bool has_images() const;                        // whether the model takes images
  const std::string& why_no_images() const;       // if not: half a sentence, with the file that is missing
  TokenId image_token() const;                    // the placeholder of an image; -1 without images
  const ImageProcessor& image_processor() const;  // only when has_images()
  bool has_chat_template() const;
  const ToolSyntax& tool_syntax() const;  // how the chat template writes calls of tools; without family: it does not

  // The text of a chat that has `images` images. Errors (InvalidArgument): no chat template; the template raised (its
  // message), or writes another number of placeholders than there are image parts; an image part in a model without
  // images; an image part whose index is out of range.
  absl::StatusOr<PromptText> write(const std::vector<Message>& messages, size_t images,
                                   const PromptOptions& options) const;
  // Each placeholder as often as its image has tokens. `images` are as many as write() was told of; InvalidArgument
  // when one that the text names is null.
  absl::StatusOr<Prompt> place(PromptText text, std::vector<std::shared_ptr<const ProcessedImage>> images) const;
  // write(), then place().
  absl::StatusOr<Prompt> build(const std::vector<Message>& messages,
                               std::vector<std::shared_ptr<const ProcessedImage>> images,
                               const PromptOptions& options) const;
  // A plain completion prompt: the text as it is, no template.
  Prompt build_plain(std::string_view text) const;

 private:
  struct Impl;
  explicit PromptBuilder(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace parvl
