#include "parvl/serve/openai_request.h"

#include <absl/strings/numbers.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "parvl/base/text.h"
#include "parvl/exec/sampler.h"
#include "parvl/serve/openai_fields.h"
#include "parvl/serve/openai_tools.h"

namespace parvl {
namespace {

// Fields that are read below; any other is unknown.
constexpr std::string_view kCommonFields[] = {"model",
                                              "stream",
                                              "stream_options",
                                              "max_tokens",
                                              "temperature",
                                              "top_p",
                                              "top_k",
                                              "min_p",
                                              "seed",
                                              "stop",
                                              "stop_token_ids",
                                              "n",
                                              "logprobs",
                                              "presence_penalty",
                                              "frequency_penalty",
                                              "repetition_penalty",
                                              "logit_bias",
                                              "ignore_eos",
                                              "min_tokens",
                                              "response_format",
                                              "structured_outputs",
                                              "guided_json",
                                              "priority",
                                              "cache_salt"};
constexpr std::string_view kChatFields[] = {"messages",    "max_completion_tokens", "top_logprobs", "tools",
                                            "tool_choice", "parallel_tool_calls",   "functions",    "function_call",
                                            "modalities",  "mm_processor_kwargs"};
constexpr std::string_view kCompletionFields[] = {"prompt", "echo", "suffix", "best_of"};

constexpr size_t kMaxSaltBytes = 256;  // a salt is kept with each cached prompt that begins with it

template <typename List>
bool contains(const List& list, std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

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

absl::Status read_max_tokens(const Json& body, Api api, SamplingParams& sampling) {
  const bool newer = api == Api::kChat && find_field(body, "max_completion_tokens") != nullptr;
  const char* field = newer ? "max_completion_tokens" : "max_tokens";
  if (find_field(body, field) == nullptr) return absl::OkStatus();
  PARVL_RETURN_IF_ERROR(read_field(body, field, sampling.max_tokens));
  if (sampling.max_tokens >= 1) return absl::OkStatus();
  return api_error(400, absl::StrCat(field, " must be at least 1, found ", sampling.max_tokens), "", field);
}

// A chat says whether and how many; a completion says both with one number.
absl::Status read_logprobs(const Json& body, Api api, SamplingParams& sampling) {
  if (api == Api::kChat) {
    PARVL_RETURN_IF_ERROR(read_field(body, "logprobs", sampling.logprobs));
    return read_field(body, "top_logprobs", sampling.top_logprobs);
  }
  sampling.logprobs = find_field(body, "logprobs") != nullptr;
  return read_count(body, "logprobs", 0, SamplingLimits::kMaxTopLogprobs, sampling.top_logprobs);
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
  PARVL_RETURN_IF_ERROR(read_max_tokens(body, request.api, sampling));
  PARVL_RETURN_IF_ERROR(read_field(body, "min_tokens", sampling.min_tokens));
  PARVL_RETURN_IF_ERROR(read_field(body, "ignore_eos", sampling.ignore_eos));
  PARVL_RETURN_IF_ERROR(read_logprobs(body, request.api, sampling));
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
  request.choices = request.n;
  int64_t priority = 0;
  constexpr int64_t kLow = std::numeric_limits<int>::min(), kHigh = std::numeric_limits<int>::max();
  PARVL_RETURN_IF_ERROR(read_count(body, "priority", kLow, kHigh, priority));
  request.priority = static_cast<int>(priority);
  PARVL_RETURN_IF_ERROR(read_field(body, "cache_salt", request.cache_salt));
  if (const Json* salt = find_field(body, "cache_salt"); salt != nullptr && *salt == "") {
    return api_error(400, "'cache_salt' must not be empty; leave it out to share cached prompts with everyone", "",
                     "cache_salt");
  }
  if (request.cache_salt.size() > kMaxSaltBytes) {
    return api_error(400,
                     absl::StrCat("'cache_salt' has ", request.cache_salt.size(), " bytes, over the limit of ",
                                  kMaxSaltBytes, "; send a hash of it"),
                     "", "cache_salt");
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
absl::Status refuse_unbuilt_chat(const Json& body) {
  if (const Json* functions = find_field(body, "functions"); functions != nullptr && !functions->empty()) {
    return unavailable("functions", "the older form of tools (use 'tools') is");
  }
  if (const Json* call = find_field(body, "function_call"); call != nullptr && *call != "none" && *call != "auto") {
    return unavailable("function_call", "the older form of tool_choice (use 'tool_choice') is");
  }
  if (const Json* modalities = find_field(body, "modalities");
      modalities != nullptr && *modalities != Json::array({"text"})) {
    return unavailable("modalities", "output other than [\"text\"] is");
  }
  return absl::OkStatus();
}

absl::Status read_completion_fields(const Json& body, const RequestRules& rules, GenerateRequest& request) {
  PARVL_RETURN_IF_ERROR(read_field(body, "echo", request.echo));
  if (request.echo && find_field(body, "logprobs") != nullptr) {
    return unavailable("echo", "the prompt's log-probabilities (leave out echo, or logprobs) are");
  }
  PARVL_RETURN_IF_ERROR(read_field(body, "suffix", request.suffix));
  if (!request.suffix.empty() && !rules.fills_in) {
    return api_error(
        400,
        absl::StrCat("'suffix': this model has not learned to fill in text, since its tokenizer has no ",
                     kFillInTokens[0], ", ", kFillInTokens[1], " and ", kFillInTokens[2], "; leave it out"),
        "", "suffix");
  }
  int64_t best_of = request.n;
  PARVL_RETURN_IF_ERROR(read_field(body, "best_of", best_of));
  if (best_of != request.n) return unavailable("best_of", "generating more choices than 'n' is");
  return absl::OkStatus();
}

absl::StatusOr<PlainPrompt> read_prompt(const Json& json, const RequestRules& rules) {
  if (json.is_string()) return json.get<std::string>();
  if (!json.is_array()) {
    return wrong_type("prompt", "a string, a list of strings, a list of token ids, or a list of such lists", json);
  }
  std::vector<TokenId> ids;
  PARVL_RETURN_IF_ERROR(read_model_tokens(json, "prompt", rules.vocab_size, ids));
  return ids;
}

absl::Status read_prompts(const Json& body, const RequestRules& rules, GenerateRequest& request) {
  const Json* prompt = find_field(body, "prompt");
  if (prompt == nullptr) return api_error(400, "'prompt' is missing", "", "prompt");
  if (prompt->is_array() && prompt->empty()) {
    return api_error(400, "'prompt' must hold at least one prompt or token", "", "prompt");
  }
  const bool many = prompt->is_array() && !prompt->front().is_number();
  const auto count = static_cast<int64_t>(many ? prompt->size() : 1);
  request.choices = count * request.n;
  if (request.choices > kMaxChoices) {
    return api_error(
        400,
        absl::StrCat("'prompt' holds ", count, " prompts, and with n = ", request.n, " the request asks for ",
                     request.choices, " choices, over the limit of ", kMaxChoices),
        "", "prompt");
  }
  for (int64_t i = 0; i < count; ++i) {
    PARVL_ASSIGN_OR_RETURN(PlainPrompt one, read_prompt(many ? (*prompt)[static_cast<size_t>(i)] : *prompt, rules));
    if (!request.suffix.empty() && !std::holds_alternative<std::string>(one)) {
      return api_error(400, "'suffix' needs a prompt that is text, found token ids", "", "suffix");
    }
    request.prompts.push_back(std::move(one));
  }
  return absl::OkStatus();
}

absl::Status read_chat(const Json& body, const RequestRules& rules, GenerateRequest& request) {
  PARVL_RETURN_IF_ERROR(read_processor_arguments(body, request.pixels));
  const Json* messages = find_field(body, "messages");
  if (messages == nullptr) return api_error(400, "'messages' is missing", "", "messages");
  return parse_messages(*messages, rules, request);
}

}  // namespace

absl::StatusOr<GenerateRequest> parse_request(std::string_view text, Api api, const RequestRules& rules) {
  const bool chat = api == Api::kChat;
  PARVL_ASSIGN_OR_RETURN(const Json body, parse_body(text, chat ? "messages" : "prompt"));
  GenerateRequest request;
  request.api = api;
  request.body_bytes = text.size();
  PARVL_RETURN_IF_ERROR(read_field(body, "model", request.model));
  PARVL_RETURN_IF_ERROR(read_engine_fields(body, request));
  PARVL_RETURN_IF_ERROR(chat ? refuse_unbuilt_chat(body) : read_completion_fields(body, rules, request));
  PARVL_RETURN_IF_ERROR(read_stream(body, request));
  PARVL_RETURN_IF_ERROR(read_sampling(body, rules, request));
  PARVL_RETURN_IF_ERROR(read_output_form(text, body, rules, request));
  PARVL_RETURN_IF_ERROR(chat ? read_chat(body, rules, request) : read_prompts(body, rules, request));
  for (const auto& [key, value] : body.items()) {
    const bool known =
        contains(kCommonFields, key) || (chat ? contains(kChatFields, key) : contains(kCompletionFields, key));
    if (!known) request.unknown_fields.push_back(key);
  }
  return request;
}

absl::StatusOr<GenerateRequest> parse_messages_alone(const Json& body, const RequestRules& rules) {
  GenerateRequest request;
  PARVL_RETURN_IF_ERROR(read_chat(body, rules, request));
  return request;
}

}  // namespace parvl
