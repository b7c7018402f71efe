// A request to generate: JSON → plain data. Pure; nothing is loaded or decoded here.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "parvl/base/json.h"
#include "parvl/base/status.h"
#include "parvl/media/prompt.h"
#include "parvl/sched/sampling.h"

namespace parvl {

// An image as the request gives it.
struct MediaReference {
  std::string url;
  std::string where;  // "messages[0].content[1].image_url"
};

// Sizes that images are brought to; 0: as the model's image processor has it.
struct PixelRange {
  int64_t min_pixels = 0;
  int64_t max_pixels = 0;
};

// The two ways to ask: messages that a template turns into a prompt, or prompts as they are.
enum class Api { kChat, kCompletions };

using PlainPrompt = std::variant<std::string, std::vector<TokenId>>;

struct GenerateRequest {
  Api api = Api::kChat;
  size_t body_bytes = 0;  // of the JSON that it was
  std::string model;      // "": left out
  std::vector<Message> messages;
  std::vector<MediaReference> images;  // by ContentPart::image_index
  PixelRange pixels;
  std::vector<PlainPrompt> prompts;  // instead of messages
  std::string suffix;                // that the answer is to lead to; with prompts that are text
  bool echo = false;                 // the answer begins with the prompt
  SamplingParams sampling;
  bool has_seed = false;
  int64_t n = 1;        // choices a prompt
  int64_t choices = 1;  // of all prompts; each is a generation of its own
  int priority = 0;
  std::string cache_salt;
  OrderedJson tools;          // for the chat template; null: none
  std::string grammar;        // the source of what the answer must follow; "": any text
  std::string grammar_field;  // that asked for it
  bool reads_calls = false;   // the answer may hold calls of tools
  bool stream = false;
  bool include_usage = false;
  std::vector<std::string> unknown_fields;

  void forget_inputs() {
    messages.clear();
    images.clear();
    prompts.clear();
    tools = nullptr;
  }
};

inline constexpr int64_t kMaxChoices = 128;  // of one request

// What the request's gaps are filled with and its numbers are held against.
struct RequestRules {
  SamplingParams defaults;
  int64_t vocab_size = 0;
  bool takes_images = false;
  std::string why_no_images = "this model takes no images";  // unless it takes them
  int64_t max_images = 0;
  ToolSyntax tools;       // of the chat template
  bool fills_in = false;  // the tokenizer has kFillInTokens
};
// Of a model that fills in text between a prompt and a suffix: before each of them, and before the answer.
inline constexpr const char* kFillInTokens[] = {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"};
// Half a sentence for a request that needs tools where there is no syntax.
inline constexpr char kNoToolSyntax[] =
    "the chat template of this model knows no tools, or writes calls in another form than Hermes (<tool_call>) and "
    "Llama 3.1's JSON; leave tools out, or serve a model whose template has them";

// Every error is an answer's status (api_error.h): 400 with `param` naming the field.
absl::StatusOr<GenerateRequest> parse_request(std::string_view body, Api api, const RequestRules& rules);

// `messages` with their images and sizes of images, and no other field.
absl::StatusOr<GenerateRequest> parse_messages_alone(const Json& body, const RequestRules& rules);
// The `messages` array (openai_messages.cc); appends to request.messages and request.images.
absl::Status parse_messages(const Json& messages, const RequestRules& rules, GenerateRequest& request);

}  // namespace parvl
