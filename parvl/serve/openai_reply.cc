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
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
}

std::string token_text(TokenId id, const Tokenizer& tokenizer) {
  Utf8Stream readable;
  std::string text = readable.push(tokenizer.token_bytes(id));
  return text + readable.flush();
}

Json token_json(TokenId id, float logprob, const Tokenizer& tokenizer) {
  Json bytes = Json::array();
  for (const char c : tokenizer.token_bytes(id)) bytes.push_back(static_cast<unsigned char>(c));
  return {{"token", token_text(id, tokenizer)},
          {"logprob", std::max(logprob, kLowestLogprob)},
          {"bytes", std::move(bytes)}};
}

Json choice_json(int64_t index, const char* key, Json content, Json logprobs, const Json& finish_reason) {
  return {
      {"index", index}, {key, std::move(content)}, {"logprobs", std::move(logprobs)}, {"finish_reason", finish_reason}};
}

std::string event(const Json& json) { return "data: " + dump_json(json) + "\n\n"; }

}  // namespace

Json ReplyFormat::logprobs_json(const Choice& choice) const {
  if (!head_.logprobs) return nullptr;
  Json content = Json::array();
  for (const TokenLogprob& logprob : choice.logprobs) {
    Json entry = token_json(logprob.token_id, logprob.logprob, tokenizer_);
    entry["top_logprobs"] = Json::array();
    for (const auto& [id, value] : logprob.top) entry["top_logprobs"].push_back(token_json(id, value, tokenizer_));
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}};
}

std::string ReplyFormat::chunk_event(Json choices, Json usage) const {
  Json chunk = {{"id", head_.id},
                {"object", "chat.completion.chunk"},
                {"created", head_.created},
                {"model", head_.model},
                {"choices", std::move(choices)}};
  if (head_.include_usage) chunk["usage"] = std::move(usage);
  return event(chunk);
}

std::string ReplyFormat::start_event(int64_t index) const {
  Json delta = {{"role", "assistant"}, {"content", ""}};
  return chunk_event(Json::array({choice_json(index, "delta", std::move(delta), nullptr, nullptr)}), nullptr);
}

std::string ReplyFormat::content_event(const Choice& choice) const {
  Json delta = {{"content", choice.text}};
  return chunk_event(
      Json::array({choice_json(choice.index, "delta", std::move(delta), logprobs_json(choice), nullptr)}), nullptr);
}

std::string ReplyFormat::finish_event(const Choice& choice) const {
  return chunk_event(
      Json::array({choice_json(choice.index, "delta", Json::object(), nullptr, to_string(choice.finish))}), nullptr);
}

std::string ReplyFormat::usage_event(const Usage& usage) const { return chunk_event(Json::array(), usage_json(usage)); }

std::string ReplyFormat::whole(const std::vector<Choice>& choices, const Usage& usage) const {
  Json list = Json::array();
  for (const Choice& choice : choices) {
    Json message = {{"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}};
    list.push_back(
        choice_json(choice.index, "message", std::move(message), logprobs_json(choice), to_string(choice.finish)));
  }
  return dump_json({{"id", head_.id},
                    {"object", "chat.completion"},
                    {"created", head_.created},
                    {"model", head_.model},
                    {"choices", std::move(list)},
                    {"usage", usage_json(usage)}});
}

std::string error_event(const std::string& error_body) { return "event: error\ndata: " + error_body + "\n\n"; }

}  // namespace parvl
