#include "parvl/serve/openai_reply.h"

#include <algorithm>
#include <utility>

#include "parvl/serve/api_error.h"

namespace parvl {
namespace {

// JSON has no infinity; the floor that OpenAI documents for tokens too unlikely to rank.
constexpr float kLowestLogprob = -9999.0f;

Json usage_json(const Usage& usage) {
  Json json = {{"prompt_tokens", usage.prompt_tokens},
               {"completion_tokens", usage.completion_tokens},
               {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
               {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
  for (const auto& [module, where] : usage.ran_on) json["ran_on"][module] = where;
  return json;
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

// `key`: where a choice's content stands ("delta", "message" or "text").
Json choice_json(const Choice& choice, const char* key, Json content, Json logprobs, const Json& finish_reason) {
  return {{"index", choice.index},
          {key, std::move(content)},
          {"logprobs", std::move(logprobs)},
          {"finish_reason", finish_reason}};
}

Json call_json(const CallText& call) {
  return {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}};
}

const char* finish_text(const Choice& choice) {
  const bool called = choice.finish == FinishReason::kStop && !choice.calls.empty() && !choice.cut_in_call;
  return called ? "tool_calls" : to_string(choice.finish);
}

std::string event(const Json& json) { return "data: " + dump_json(json) + "\n\n"; }

}  // namespace

// Special tokens are hidden.
int64_t ReplyFormat::shown_characters(TokenId id) const {
  if (tokenizer_.is_special(id)) return 0;
  const std::string text = token_text(id, tokenizer_);
  return std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; });
}

Json ReplyFormat::logprobs_json(const Choice& choice) const {
  if (!head_.logprobs) return nullptr;
  return chat() ? chat_logprobs(choice) : completion_logprobs(choice);
}

Json ReplyFormat::chat_logprobs(const Choice& choice) const {
  Json content = Json::array();
  for (const TokenLogprob& logprob : choice.logprobs) {
    Json entry = token_json(logprob.token_id, logprob.logprob, tokenizer_);
    entry["top_logprobs"] = Json::array();
    for (const auto& [id, value] : logprob.top) entry["top_logprobs"].push_back(token_json(id, value, tokenizer_));
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}};
}

// The older form: parallel lists. The chosen token is always among the top ones; of tokens that read alike, the
// likelier is shown.
Json ReplyFormat::completion_logprobs(const Choice& choice) const {
  Json tokens = Json::array(), values = Json::array(), tops = Json::array(), offsets = Json::array();
  int64_t offset = choice.text_offset;
  for (const TokenLogprob& logprob : choice.logprobs) {
    const std::string text = token_text(logprob.token_id, tokenizer_);
    const float value = std::max(logprob.logprob, kLowestLogprob);
    Json top = {{text, value}};
    for (const auto& [id, other] : logprob.top)
      top.emplace(token_text(id, tokenizer_), std::max(other, kLowestLogprob));
    tokens.push_back(text);
    values.push_back(value);
    tops.push_back(std::move(top));
    offsets.push_back(offset);
    offset += shown_characters(logprob.token_id);
  }
  return {{"tokens", std::move(tokens)},
          {"token_logprobs", std::move(values)},
          {"top_logprobs", std::move(tops)},
          {"text_offset", std::move(offsets)}};
}

Json ReplyFormat::reply(const char* chat_object, Json choices) const {
  return {{"id", head_.id},
          {"object", chat() ? chat_object : "text_completion"},
          {"created", head_.created},
          {"model", head_.model},
          {"choices", std::move(choices)}};
}

std::string ReplyFormat::chunk_event(Json choices, Json usage) const {
  Json chunk = reply("chat.completion.chunk", std::move(choices));
  if (head_.include_usage) chunk["usage"] = std::move(usage);
  return event(chunk);
}

std::string ReplyFormat::choice_event(Json choice) const {
  return chunk_event(Json::array({std::move(choice)}), nullptr);
}

std::string ReplyFormat::start_event(const Choice& choice) const {
  if (!chat()) return "";
  Json delta = {{"role", "assistant"}, {"content", ""}};
  return choice_event(choice_json(choice, "delta", std::move(delta), nullptr, nullptr));
}

Json ReplyFormat::take_logprobs(Choice& choice) const {
  Json logprobs = logprobs_json(choice);
  for (const TokenLogprob& logprob : choice.logprobs) choice.text_offset += shown_characters(logprob.token_id);
  choice.logprobs.clear();
  return logprobs;
}

std::string ReplyFormat::content_event(Choice& choice) const {
  Json logprobs = take_logprobs(choice);
  const std::string text = std::exchange(choice.text, {});
  return choice_event(chat() ? choice_json(choice, "delta", {{"content", text}}, std::move(logprobs), nullptr)
                             : choice_json(choice, "text", text, std::move(logprobs), nullptr));
}

std::string ReplyFormat::calls_event(Choice& choice) const {
  Json parts = Json::array();
  for (size_t i = 0; i < choice.calls.size(); ++i) {
    CallText& call = choice.calls[i];
    if (call.announced && call.arguments.empty()) continue;
    Json part = {{"function", {{"arguments", call.arguments}}}};
    if (!std::exchange(call.announced, true)) part = call_json(call);
    part["index"] = i;
    parts.push_back(std::move(part));
    call.arguments.clear();
  }
  if (parts.empty()) return "";
  return choice_event(choice_json(choice, "delta", {{"tool_calls", std::move(parts)}}, take_logprobs(choice), nullptr));
}

std::string ReplyFormat::finish_event(const Choice& choice) const {
  const char* reason = finish_text(choice);
  return choice_event(chat() ? choice_json(choice, "delta", Json::object(), nullptr, reason)
                             : choice_json(choice, "text", "", nullptr, reason));
}

std::string ReplyFormat::usage_event(const Usage& usage) const { return chunk_event(Json::array(), usage_json(usage)); }

std::string ReplyFormat::whole(const std::vector<Choice>& choices, const Usage& usage) const {
  Json list = Json::array();
  for (const Choice& choice : choices) {
    const char* reason = finish_text(choice);
    Json content = choice.text;
    if (chat()) content = {{"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}};
    if (!choice.calls.empty()) {
      if (choice.text.empty()) content["content"] = nullptr;
      for (const CallText& call : choice.calls) content["tool_calls"].push_back(call_json(call));
    }
    list.push_back(choice_json(choice, chat() ? "message" : "text", std::move(content), logprobs_json(choice), reason));
  }
  Json json = reply("chat.completion", std::move(list));
  json["usage"] = usage_json(usage);
  return dump_json(json);
}

std::string error_event(const std::string& error_body) { return "event: error\ndata: " + error_body + "\n\n"; }

}  // namespace parvl
