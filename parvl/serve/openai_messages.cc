// The `messages` array of a chat completion request.
#include "parvl/base/text.h"
#include "parvl/serve/api_error.h"
#include "parvl/serve/openai_fields.h"
#include "parvl/serve/openai_tools.h"

namespace parvl {
namespace {

absl::Status wrong(const std::string& where, const std::string& message) {
  return api_error(400, where + " " + message, "", where);
}

absl::StatusOr<std::string> required_string(const Json& object, const char* key, const std::string& where) {
  const auto it = object.find(key);
  const std::string place = absl::StrCat(where, ".", key);
  if (it == object.end()) return wrong(place, "is missing");
  if (!it->is_string()) return wrong(place, absl::StrCat("must be a string, found ", it->type_name()));
  return it->get<std::string>();
}

absl::Status parse_image(const Json& part, const std::string& where, const RequestRules& rules,
                         GenerateRequest& request, Message& message) {
  const std::string place = where + ".image_url";
  if (!rules.takes_images) return wrong(where, "is an image, and " + rules.why_no_images);
  const auto it = part.find("image_url");
  if (it == part.end()) return wrong(place, "is missing");
  std::string url;
  if (it->is_string()) {
    url = it->get<std::string>();
  } else if (it->is_object()) {
    PARVL_ASSIGN_OR_RETURN(url, required_string(*it, "url", place));
    const Json* detail = find_field(*it, "detail");  // of no effect; mm_processor_kwargs says the size
    if (detail != nullptr && *detail != "auto" && *detail != "low" && *detail != "high") {
      return wrong(place + ".detail", "must be auto, low or high, found " + shown(*detail));
    }
  } else {
    return wrong(place, "must be an object with `url`");
  }
  if (static_cast<int64_t>(request.images.size()) >= rules.max_images) {
    return api_error(400,
                     absl::StrCat("the request has more than ", rules.max_images,
                                  " images, the limit of a request (--limit-mm-per-prompt)"),
                     "too_many_items", "messages");
  }
  message.content.push_back({ContentPart::Kind::kImage, "", static_cast<int>(request.images.size())});
  request.images.push_back({std::move(url), place});
  return absl::OkStatus();
}

absl::Status parse_part(const Json& part, const std::string& where, const RequestRules& rules, GenerateRequest& request,
                        Message& message) {
  if (!part.is_object()) return wrong(where, "must be an object with `type`");
  PARVL_ASSIGN_OR_RETURN(const std::string type, required_string(part, "type", where));
  if (type == "text") {
    PARVL_ASSIGN_OR_RETURN(std::string text, required_string(part, "text", where));
    message.content.push_back({ContentPart::Kind::kText, std::move(text), -1});
    return absl::OkStatus();
  }
  if (type == "image_url") return parse_image(part, where, rules, request, message);
  if (type == "input_audio" || type == "audio_url") return unavailable(where, "audio input (" + type + ") is");
  if (type == "video_url" || type == "video") return unavailable(where, "video input (" + type + ") is");
  return wrong(where + ".type", "is " + excerpt(type) + "; text and image_url are known");
}

// What calls of tools add to a message.
absl::Status parse_tool_parts(const Json& json, const std::string& where, const RequestRules& rules, Message& message,
                              size_t& argument_bytes) {
  const std::string& role = message.role;
  if (role != "system" && role != "user" && role != "assistant" && role != "tool") {
    return wrong(where + ".role", "must be system, developer, user, assistant or tool, found " + excerpt(role));
  }
  if (const Json* call = find_field(json, "function_call"); call != nullptr) {
    return unavailable(where + ".function_call", "the older form of tool_calls (use 'tool_calls') is");
  }
  const Json* calls = find_field(json, "tool_calls");
  const bool has_calls = calls != nullptr && *calls != Json::array();
  if (role != "tool" && !has_calls) return absl::OkStatus();
  if (rules.tools.family.empty()) return wrong(where, "is about tools, and " + std::string(kNoToolSyntax));
  if (role == "tool") {
    PARVL_ASSIGN_OR_RETURN(message.tool_call_id, required_string(json, "tool_call_id", where));
    if (const Json* name = find_field(json, "name"); name != nullptr && name->is_string()) message.name = *name;
    return absl::OkStatus();
  }
  if (role != "assistant") return wrong(where + ".tool_calls", "belong to messages of the assistant");
  return read_tool_calls(*calls, where + ".tool_calls", message, argument_bytes);
}

absl::Status parse_message(const Json& json, const std::string& where, const RequestRules& rules,
                           GenerateRequest& request, size_t& argument_bytes) {
  if (!json.is_object()) return wrong(where, "must be an object with `role` and `content`");
  Message message;
  PARVL_ASSIGN_OR_RETURN(message.role, required_string(json, "role", where));
  if (message.role == "developer") message.role = "system";  // OpenAI's newer name for it
  PARVL_RETURN_IF_ERROR(parse_tool_parts(json, where, rules, message, argument_bytes));
  const auto content = json.find("content");
  if (content == json.end() || content->is_null()) {
    if (message.role != "assistant") return wrong(where + ".content", "is missing");
  } else if (content->is_string()) {
    message.content.push_back({ContentPart::Kind::kText, content->get<std::string>(), -1});
  } else if (content->is_array()) {
    for (size_t i = 0; i < content->size(); ++i) {
      PARVL_RETURN_IF_ERROR(
          parse_part((*content)[i], absl::StrCat(where, ".content[", i, "]"), rules, request, message));
    }
  } else {
    return wrong(where + ".content", absl::StrCat("must be a string or a list of parts, found ", content->type_name()));
  }
  request.messages.push_back(std::move(message));
  return absl::OkStatus();
}

}  // namespace

absl::Status parse_messages(const Json& messages, const RequestRules& rules, GenerateRequest& request) {
  if (!messages.is_array()) {
    return wrong("messages", absl::StrCat("must be a list of messages, found ", messages.type_name()));
  }
  if (messages.empty()) return wrong("messages", "must hold at least one message");
  size_t argument_bytes = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    PARVL_RETURN_IF_ERROR(
        parse_message(messages[i], absl::StrCat("messages[", i, "]"), rules, request, argument_bytes));
  }
  return absl::OkStatus();
}

}  // namespace parvl
