#include "parvl/serve/openai_request.h"

#include <absl/strings/numbers.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "parvl/base/text.h"
#include "parvl/exec/sampler.h"
#include "parvl/serve/openai_fields.h"

namespace parvl {
namespace {

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

absl::Status read_stops(const Json& body, SamplingParams& sampling) {
  if (const Json* stop = find_field(body, "stop")) {
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
  if (const Json* ids = find_field(body, "stop_token_ids")) {
    sampling.stop_token_ids.clear();
    PARVL_RETURN_IF_ERROR(read_token_ids(*ids, "stop_token_ids", sampling.stop_token_ids));
  }
  return absl::OkStatus();
}

absl::Status read_logit_bias(const Json& body, SamplingParams& sampling) {
  const Json* biases = find_field(body, "logit_bias");
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

absl::Status read_seed(const Json& body, GenerateRequest& request) {
  const Json* seed = find_field(body, "seed");
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

absl::Status read_sampling(const Json& body, const RequestRules& rules, GenerateRequest& request) {
  SamplingParams& sampling = request.sampling;
  sampling = rules.defaults;
  PARVL_RETURN_IF_ERROR(read_field(body, "temperature", sampling.temperature));
  PARVL_RETURN_IF_ERROR(read_field(body, "top_p", sampling.top_p));
  PARVL_RETURN_IF_ERROR(read_field(body, "top_k", sampling.top_k));
  PARVL_RETURN_IF_ERROR(read_field(body, "min_p", sampling.min_p));
  PARVL_RETURN_IF_ERROR(read_field(body, "presence_penalty", sampling.presence_penalty));
  PARVL_RETURN_IF_ERROR(read_field(body, "frequency_penalty", sampling.frequency_penalty));
  PARVL_RETURN_IF_ERROR(read_field(body, "repetition_penalty", sampling.repetition_penalty));
  const char* max_field = find_field(body, "max_completion_tokens") != nullptr ? "max_completion_tokens" : "max_tokens";
  if (find_field(body, max_field) != nullptr) {
    PARVL_RETURN_IF_ERROR(read_field(body, max_field, sampling.max_tokens));
    if (sampling.max_tokens < 1) {
      return api_error(400, absl::StrCat(max_field, " must be at least 1, found ", sampling.max_tokens), "", max_field);
    }
  }
  PARVL_RETURN_IF_ERROR(read_field(body, "min_tokens", sampling.min_tokens));
  PARVL_RETURN_IF_ERROR(read_field(body, "ignore_eos", sampling.ignore_eos));
  PARVL_RETURN_IF_ERROR(read_field(body, "logprobs", sampling.logprobs));
  PARVL_RETURN_IF_ERROR(read_field(body, "top_logprobs", sampling.top_logprobs));
  PARVL_RETURN_IF_ERROR(read_stops(body, sampling));
  PARVL_RETURN_IF_ERROR(read_logit_bias(body, sampling));
  PARVL_RETURN_IF_ERROR(read_seed(body, request));
  return validate_sampling(sampling, rules.vocab_size);
}

absl::Status read_stream(const Json& body, GenerateRequest& request) {
  PARVL_RETURN_IF_ERROR(read_field(body, "stream", request.stream));
  const Json* options = find_field(body, "stream_options");
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

// How the engine is to treat the request.
absl::Status read_engine_fields(const Json& body, GenerateRequest& request) {
  PARVL_RETURN_IF_ERROR(read_count(body, "n", 1, kMaxChoices, request.n));
  int64_t priority = 0;
  constexpr int64_t kLow = std::numeric_limits<int>::min(), kHigh = std::numeric_limits<int>::max();
  PARVL_RETURN_IF_ERROR(read_count(body, "priority", kLow, kHigh, priority));
  request.priority = static_cast<int>(priority);
  PARVL_RETURN_IF_ERROR(read_field(body, "cache_salt", request.cache_salt));
  if (const Json* salt = find_field(body, "cache_salt"); salt != nullptr && *salt == "") {
    return api_error(400, "'cache_salt' must not be empty; leave it out to share cached prompts with everyone", "",
                     "cache_salt");
  }
  return absl::OkStatus();
}

absl::Status read_processor_arguments(const Json& body, PixelRange& pixels) {
  constexpr char kField[] = "mm_processor_kwargs";
  constexpr int64_t kHigh = int64_t{1} << 32;
  const Json* arguments = find_field(body, kField);
  if (arguments == nullptr) return absl::OkStatus();
  if (!arguments->is_object()) return wrong_type(kField, "an object", *arguments);
  for (const auto& [key, value] : arguments->items()) {
    if (key != "min_pixels" && key != "max_pixels") {
      return unavailable(kField, "changing " + excerpt(key) + " (only min_pixels and max_pixels can be) is");
    }
    int64_t& out = key == "min_pixels" ? pixels.min_pixels : pixels.max_pixels;
    const absl::Status status = value.is_null() ? absl::OkStatus() : read_count(*arguments, key.c_str(), 1, kHigh, out);
    if (!status.ok()) return api_error(400, absl::StrCat(kField, ": ", status.message()), "", kField);
  }
  return absl::OkStatus();
}

// Fields of the contract whose effect is not built: the value that asks for nothing is accepted, any other refused.
absl::Status refuse_unavailable(const Json& body) {
  for (const char* field : {"tools", "functions"}) {
    const Json* value = find_field(body, field);
    if (value != nullptr && !value->is_array()) return wrong_type(field, "a list", *value);
    if (value != nullptr && !value->empty()) return unavailable(field, "tool calling is");
  }
  for (const char* field : {"tool_choice", "function_call"}) {
    const Json* value = find_field(body, field);
    if (value != nullptr && *value != "none" && *value != "auto") return unavailable(field, "tool calling is");
  }
  if (const Json* format = find_field(body, "response_format")) {
    if (!format->is_object() || !format->contains("type") || !(*format)["type"].is_string()) {
      return api_error(400, "'response_format' must be an object with a string `type`", "", "response_format");
    }
    const std::string type = (*format)["type"];
    if (type != "text") return unavailable("response_format", "the type " + excerpt(type) + " is");
  }
  if (const Json* modalities = find_field(body, "modalities");
      modalities != nullptr && *modalities != Json::array({"text"})) {
    return unavailable("modalities", "output other than [\"text\"] is");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GenerateRequest> parse_chat_request(std::string_view text, const RequestRules& rules) {
  PARVL_ASSIGN_OR_RETURN(const Json body, parse_body(text, "messages"));
  GenerateRequest request;
  PARVL_RETURN_IF_ERROR(read_field(body, "model", request.model));
  PARVL_RETURN_IF_ERROR(refuse_unavailable(body));
  PARVL_RETURN_IF_ERROR(read_engine_fields(body, request));
  PARVL_RETURN_IF_ERROR(read_processor_arguments(body, request.pixels));
  PARVL_RETURN_IF_ERROR(read_stream(body, request));
  PARVL_RETURN_IF_ERROR(read_sampling(body, rules, request));
  const Json* messages = find_field(body, "messages");
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
