#include "parvl/serve/openai_reply.h"

#include <algorithm>
#include <utility>

#include "parvl/serve/api_error.h"

namespace parvl {
namespace {

// JSON has no infinity; the floor that OpenAI documents for tokens too unlikely to rank.
constexpr float kLowestLogprob = -9999.0f;

Json usage_json(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens}};
}

Json token_json(TokenId id, float logprob, const Tokenizer& tokenizer) {
  const std::string_view bytes = tokenizer.token_bytes(id);
  Utf8Stream readable;
  std::string text = readable.push(bytes);
  text += readable.flush();
  Json list = Json::array();
  for (const char c : bytes) list.push_back(static_cast<unsigned char>(c));
  return {{"token", text}, {"logprob", std::max(logprob, kLowestLogprob)}, {"bytes", std::move(list)}};
}

Json choice(const char* key, Json content, const Json& logprobs, const Json& finish_reason) {
  return Json::array({{{"index", 0},
                       {key, std::move(content)},
                       {"logprobs", logprobs.is_null() ? Json(nullptr) : Json{{"content", logprobs}}},
                       {"finish_reason", finish_reason}}});
}

std::string event(const Json& json) { return "data: " + dump_json(json) + "\n\n"; }

}  // namespace

std::string CompletionFormat::chunk_event(Json choices, Json usage) const {
  Json chunk = {{"id", id_},
                {"object", "chat.completion.chunk"},
                {"created", created_},
                {"model", model_},
                {"choices", std::move(choices)}};
  if (include_usage_) chunk["usage"] = std::move(usage);
  return event(chunk);
}

std::string CompletionFormat::role_event() const {
  return chunk_event(choice("delta", {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr), nullptr);
}

std::string CompletionFormat::content_event(const std::string& text, const Json& logprobs) const {
  return chunk_event(choice("delta", {{"content", text}}, logprobs, nullptr), nullptr);
}

std::string CompletionFormat::finish_event(FinishReason reason) const {
  return chunk_event(choice("delta", Json::object(), nullptr, to_string(reason)), nullptr);
}

std::string CompletionFormat::usage_event(const Usage& usage) const {
  return chunk_event(Json::array(), usage_json(usage));
}

std::string CompletionFormat::completion(const std::string& text, const Json& logprobs, FinishReason reason,
                                         const Usage& usage) const {
  return dump_json({{"id", id_},
                    {"object", "chat.completion"},
                    {"created", created_},
                    {"model", model_},
                    {"choices", choice("message", {{"role", "assistant"}, {"content", text}, {"refusal", nullptr}},
                                       logprobs, to_string(reason))},
                    {"usage", usage_json(usage)}});
}

std::string error_event(const std::string& error_body) { return "event: error\ndata: " + error_body + "\n\n"; }

Json logprob_entry(const TokenLogprob& logprob, const Tokenizer& tokenizer) {
  Json entry = token_json(logprob.token_id, logprob.logprob, tokenizer);
  entry["top_logprobs"] = Json::array();
  for (const auto& [id, value] : logprob.top) entry["top_logprobs"].push_back(token_json(id, value, tokenizer));
  return entry;
}

}  // namespace parvl
