#include "parvl/serve/openai_request.h"

#include <absl/strings/numbers.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "parvl/base/text.h"
#include "parvl/exec/sampler.h"
#include "parvl/serve/api_error.h"

namespace parvl {
namespace {

constexpr size_t kMaxValues = 1'000'000;  // of one request's JSON; each costs far more memory than its text

// Fields that are read below; any other is unknown.
constexpr std::array<std::string_view, 31> kKnownFields = {"messages",
                                                           "model",
                                                           "stream",
                                                           "stream_options",
                                                           "max_tokens",
                                                           "max_completion_tokens",
                                                           "temperature",
                                                           "top_p",
                                                           "top_k",
                                                           "min_p",
                                                           "seed",
                                                           "stop",
                                                           "stop_token_ids",
                                                           "n",
                                                           "logprobs",
                                                           "top_logprobs",
                                                           "presence_penalty",
                                                           "frequency_penalty",
                                                           "repetition_penalty",
                                                           "logit_bias",
                                                           "ignore_eos",
                                                           "min_tokens",
                                                           "response_format",
                                                           "tools",
                                                           "tool_choice",
                                                           "functions",
                                                           "function_call",
                                                           "priority",
                                                           "cache_salt",
                                                           "mm_processor_kwargs",
                                                           "modalities"};

absl::Status wrong_type(const std::string& field, const std::string& wanted, const Json& value) {
  return api_error(400, absl::StrCat("'", field, "' must be ", wanted, ", found ", shown(value)), "", field);
}

absl::Status unavailable(const std::string& field, const std::string& what) {
  return api_error(400, absl::StrCat("'", field, "': ", what, " not available yet"), "not_available_yet", field);
}

// The field's value, or nullptr when it is absent or null.
const Json* find(const Json& object, const char* field) {
  const auto it = object.find(field);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

// Overwrites `out` when the field is there.
template <typename T>
absl::Status read(const Json& body, const char* field, T& out) {
  absl::StatusOr<T> value = json_value<T>(body, field, out);
  if (!value.ok()) return with_field(value.status(), field);
  out = *value;
  return absl::OkStatus();
}

absl::Status read_token_id(const Json& value, const char* field, TokenId& out) {
  if (!value.is_number_integer()) return wrong_type(field, "a list of token ids (whole numbers)", value);
  const bool fits = value.is_number_unsigned()
                        ? value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<TokenId>::max())
                        : value.get<int64_t>() >= std::numeric_limits<TokenId>::min();
  if (!fits) return api_error(400, absl::StrCat("'", field, "' names a token id that is out of range"), "", field);
  out = value.get<TokenId>();
  return absl::OkStatus();
}

absl::Status read_stops(const Json& body, SamplingParams& sampling) {
  if (const Json* stop = find(body, "stop")) {
    sampling.stop.clear();
    if (stop->is_string()) {
      sampling.stop.push_back(stop->get<std::string>());
    } else if (stop->is_array()) {
      for (const Json& text : *stop) {
        if (!text.is_string()) return wrong_type("stop", "a string or a list of strings", text);
        sampling.stop.push_back(text.get<std::string>());
      }
    } else {
      return wrong_type("stop", "a string or a list of strings", *stop);
    }
  }
  if (const Json* ids = find(body, "stop_token_ids")) {
    if (!ids->is_array()) return wrong_type("stop_token_ids", "a list of token ids (whole numbers)", *ids);
    sampling.stop_token_ids.clear();
    for (const Json& id : *ids) {
      PARVL_RETURN_IF_ERROR(read_token_id(id, "stop_token_ids", sampling.stop_token_ids.emplace_back()));
    }
  }
  return absl::OkStatus();
}

absl::Status read_logit_bias(const Json& body, SamplingParams& sampling) {
  const Json* biases = find(body, "logit_bias");
  if (biases == nullptr) return absl::OkStatus();
  if (!biases->is_object()) return wrong_type("logit_bias", "an object of token id to bias", *biases);
  sampling.logit_bias.clear();
  for (const auto& [key, value] : biases->items()) {
    TokenId id = 0;
    if (!absl::SimpleAtoi(key, &id)) {
      return api_error(400, "'logit_bias' has the key " + excerpt(key) + ", which is no token id", "", "logit_bias");
    }
    if (!value.is_number()) return wrong_type("logit_bias", "an object of token id to bias (a number)", value);
    sampling.logit_bias[id] = value.get<double>();
  }
  return absl::OkStatus();
}

absl::Status read_seed(const Json& body, ChatRequest& request) {
  const Json* seed = find(body, "seed");
  if (seed == nullptr) return absl::OkStatus();
  if (!seed->is_number_integer()) {
    if (seed->is_number() && std::abs(seed->get<double>()) >= 0x1p63) {
      return api_error(400,
                       absl::StrCat("'seed' must be between ", std::numeric_limits<int64_t>::min(), " and ",
                                    std::numeric_limits<uint64_t>::max(), ", found ", shown(*seed)),
                       "", "seed");
    }
    return wrong_type("seed", "a whole number", *seed);
  }
  request.has_seed = true;  // a negative one, which OpenAI's API allows too, is one of the upper half
  request.sampling.seed =
      seed->is_number_unsigned() ? seed->get<uint64_t>() : static_cast<uint64_t>(seed->get<int64_t>());
  return absl::OkStatus();
}

absl::Status read_sampling(const Json& body, const ChatRules& rules, ChatRequest& request) {
  SamplingParams& sampling = request.sampling;
  sampling = rules.defaults;
  PARVL_RETURN_IF_ERROR(read(body, "temperature", sampling.temperature));
  PARVL_RETURN_IF_ERROR(read(body, "top_p", sampling.top_p));
  PARVL_RETURN_IF_ERROR(read(body, "top_k", sampling.top_k));
  PARVL_RETURN_IF_ERROR(read(body, "min_p", sampling.min_p));
  PARVL_RETURN_IF_ERROR(read(body, "presence_penalty", sampling.presence_penalty));
  PARVL_RETURN_IF_ERROR(read(body, "frequency_penalty", sampling.frequency_penalty));
  PARVL_RETURN_IF_ERROR(read(body, "repetition_penalty", sampling.repetition_penalty));
  const char* max_field = find(body, "max_completion_tokens") != nullptr ? "max_completion_tokens" : "max_tokens";
  if (find(body, max_field) != nullptr) {
    PARVL_RETURN_IF_ERROR(read(body, max_field, sampling.max_tokens));
    if (sampling.max_tokens < 1) {
      return api_error(400, absl::StrCat(max_field, " must be at least 1, found ", sampling.max_tokens), "", max_field);
    }
  }
  PARVL_RETURN_IF_ERROR(read(body, "min_tokens", sampling.min_tokens));
  PARVL_RETURN_IF_ERROR(read(body, "ignore_eos", sampling.ignore_eos));
  PARVL_RETURN_IF_ERROR(read(body, "logprobs", sampling.logprobs));
  PARVL_RETURN_IF_ERROR(read(body, "top_logprobs", sampling.top_logprobs));
  PARVL_RETURN_IF_ERROR(read_stops(body, sampling));
  PARVL_RETURN_IF_ERROR(read_logit_bias(body, sampling));
  PARVL_RETURN_IF_ERROR(read_seed(body, request));
  return validate_sampling(sampling, rules.vocab_size);
}

absl::Status read_stream(const Json& body, ChatRequest& request) {
  PARVL_RETURN_IF_ERROR(read(body, "stream", request.stream));
  const Json* options = find(body, "stream_options");
  if (options == nullptr) return absl::OkStatus();
  if (!options->is_object()) return wrong_type("stream_options", "an object", *options);
  if (!request.stream) {
    return api_error(400, "'stream_options' is only allowed when 'stream' is true", "", "stream_options");
  }
  absl::StatusOr<bool> include_usage = json_value<bool>(*options, "include_usage", false);
  if (!include_usage.ok()) return with_field(include_usage.status(), "stream_options.include_usage");
  request.include_usage = *include_usage;
  return absl::OkStatus();
}

// Fields of the contract whose effect is not built: the value that asks for nothing is accepted, any other refused.
absl::Status refuse_unavailable(const Json& body) {
  int64_t n = 1, priority = 0;
  PARVL_RETURN_IF_ERROR(read(body, "n", n));
  if (n < 1) return api_error(400, absl::StrCat("n must be at least 1, found ", n), "", "n");
  if (n > 1) return unavailable("n", "more than one choice is");
  PARVL_RETURN_IF_ERROR(read(body, "priority", priority));
  if (priority != 0) return unavailable("priority", "an order other than by arrival is");
  for (const char* field : {"tools", "functions"}) {
    const Json* value = find(body, field);
    if (value != nullptr && !value->is_array()) return wrong_type(field, "a list", *value);
    if (value != nullptr && !value->empty()) return unavailable(field, "tool calling is");
  }
  for (const char* field : {"tool_choice", "function_call"}) {
    const Json* value = find(body, field);
    if (value != nullptr && *value != "none" && *value != "auto") return unavailable(field, "tool calling is");
  }
  if (const Json* format = find(body, "response_format")) {
    if (!format->is_object() || !format->contains("type") || !(*format)["type"].is_string()) {
      return api_error(400, "'response_format' must be an object with a string `type`", "", "response_format");
    }
    const std::string type = (*format)["type"];
    if (type != "text") return unavailable("response_format", "the type " + excerpt(type) + " is");
  }
  if (const Json* salt = find(body, "cache_salt"); salt != nullptr && (!salt->is_string() || *salt == "")) {
    return wrong_type("cache_salt", "a string that is not empty",
                      *salt);  // nothing is shared between requests yet, so any salt holds
  }
  if (const Json* arguments = find(body, "mm_processor_kwargs")) {
    if (!arguments->is_object()) return wrong_type("mm_processor_kwargs", "an object", *arguments);
    if (!arguments->empty()) return unavailable("mm_processor_kwargs", "changing the image processor is");
  }
  if (const Json* modalities = find(body, "modalities");
      modalities != nullptr && *modalities != Json::array({"text"})) {
    return unavailable("modalities", "output other than [\"text\"] is");
  }
  return absl::OkStatus();
}

// An upper bound on the number of values in a JSON text.
size_t count_values(std::string_view text) {
  size_t count = 1;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else {
      if (c == '"') in_string = true;
      if (c == ',' || c == '[' || c == '{') ++count;
    }
  }
  return count;
}

}  // namespace

absl::StatusOr<ChatRequest> parse_chat_request(std::string_view text, const ChatRules& rules) {
  if (count_values(text) > kMaxValues) {
    return api_error(400,
                     absl::StrCat("the body holds more than ", kMaxValues, " JSON values, the limit of a request"));
  }
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    return api_error(400, "the body is empty; send a JSON object with `messages`");
  }
  PARVL_ASSIGN_OR_RETURN(const Json body, parse_json(text, "the body"));
  if (!body.is_object()) return api_error(400, absl::StrCat("the body must be a JSON object, found ", shown(body)));
  ChatRequest request;
  PARVL_RETURN_IF_ERROR(read(body, "model", request.model));
  PARVL_RETURN_IF_ERROR(refuse_unavailable(body));
  PARVL_RETURN_IF_ERROR(read_stream(body, request));
  PARVL_RETURN_IF_ERROR(read_sampling(body, rules, request));
  const Json* messages = find(body, "messages");
  if (messages == nullptr) return api_error(400, "'messages' is missing", "", "messages");
  PARVL_RETURN_IF_ERROR(parse_messages(*messages, rules, request));
  for (const auto& [key, value] : body.items()) {
    if (std::find(kKnownFields.begin(), kKnownFields.end(), key) == kKnownFields.end()) {
      request.unknown_fields.push_back(key);
    }
  }
  return request;
}

}  // namespace parvl
