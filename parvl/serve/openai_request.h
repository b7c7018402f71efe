// A chat completion request: JSON → plain data. Pure; nothing is loaded or decoded here.
#pragma once

#include <cstdint>
#include <string>
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

struct ChatRequest {
  std::string model;  // "": left out
  std::vector<Message> messages;
  std::vector<MediaReference> images;  // by ContentPart::image_index
  SamplingParams sampling;
  bool has_seed = false;
  bool stream = false;
  bool include_usage = false;
  std::vector<std::string> unknown_fields;
};

// What the request's gaps are filled with and its numbers are held against.
struct ChatRules {
  SamplingParams defaults;
  int64_t vocab_size = 0;
  bool takes_images = false;
  std::string why_no_images = "this model takes no images";  // unless it takes them
  int64_t max_images = 0;
};

// Every error is an answer's status (api_error.h): 400 with `param` naming the field.
absl::StatusOr<ChatRequest> parse_chat_request(std::string_view body, const ChatRules& rules);

// The `messages` array alone (openai_messages.cc); appends to request.messages and request.images.
absl::Status parse_messages(const Json& messages, const ChatRules& rules, ChatRequest& request);

}  // namespace parvl
