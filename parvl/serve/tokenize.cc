#include "parvl/serve/tokenize.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parvl/serve/gateway.h"
#include "parvl/serve/openai_fields.h"
#include "parvl/serve/patience.h"

namespace parvl {
namespace {

absl::Status check_named_model(const Json& body, const Gateway& gateway) {
  std::string name;
  PARVL_RETURN_IF_ERROR(read_field(body, "model", name));
  return name.empty() ? absl::OkStatus() : gateway.check_model(name);
}

// Who asks how long a text is may not know yet that it is too long.
PromptMaker counter(const Gateway& gateway) {
  PromptMaker maker = gateway.prompt_maker(gateway.stop_token());
  maker.only_counts = true;
  return maker;
}

absl::StatusOr<std::vector<TokenId>> tokens_of_text(const Json& body, const Gateway& gateway) {
  std::string text;
  bool add_special_tokens = true;
  PARVL_RETURN_IF_ERROR(read_field(body, "prompt", text));
  PARVL_RETURN_IF_ERROR(read_field(body, "add_special_tokens", add_special_tokens));
  return counter(gateway).tokens_of(text, add_special_tokens);
}

absl::StatusOr<std::vector<TokenId>> tokens_of_messages(const Json& body, const Gateway& gateway) {
  PARVL_ASSIGN_OR_RETURN(const GenerateRequest request, parse_messages_alone(body, gateway.model().rules));
  PromptOptions options;
  PARVL_RETURN_IF_ERROR(read_field(body, "add_generation_prompt", options.add_generation_prompt));
  PARVL_ASSIGN_OR_RETURN(Prompt prompt, counter(gateway).prepare_chat(request, options));
  return std::move(prompt.ids);
}

absl::StatusOr<Json> tokenize(const std::string& text, const Gateway& gateway) {
  PARVL_ASSIGN_OR_RETURN(const Json body, parse_body(text, "prompt` or `messages"));
  PARVL_RETURN_IF_ERROR(check_named_model(body, gateway));
  const bool has_text = find_field(body, "prompt") != nullptr;
  if (has_text == (find_field(body, "messages") != nullptr)) {
    return api_error(400, "give either 'prompt' (a string) or 'messages'", "", "prompt");
  }
  PARVL_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens,
                         has_text ? tokens_of_text(body, gateway) : tokens_of_messages(body, gateway));
  const int64_t limit = gateway.model().limits.max_model_len;
  return Json{{"count", tokens.size()}, {"max_model_len", limit}, {"tokens", tokens}};
}

absl::StatusOr<Json> detokenize(const std::string& text, const Gateway& gateway) {
  PARVL_ASSIGN_OR_RETURN(const Json body, parse_body(text, "tokens"));
  PARVL_RETURN_IF_ERROR(check_named_model(body, gateway));
  const Json* list = find_field(body, "tokens");
  if (list == nullptr) return api_error(400, "'tokens' is missing", "", "tokens");
  const LoadedModel& model = gateway.model();
  std::vector<TokenId> tokens;
  PARVL_RETURN_IF_ERROR(read_model_tokens(*list, "tokens", model.rules.vocab_size, tokens));
  return Json{{"prompt", model.prompts().tokenizer().decode(tokens, false)}};
}

// The whole work on a pool thread, which may read what the gateway holds; long texts take their time.
template <typename Work>
asio::awaitable<void> answer_with(Gateway& gateway, asio::thread_pool& pool, HttpConnection& connection, Work work) {
  const Gateway::ActiveRequest active(gateway, *connection.wakeup());
  Patience patience(gateway, connection);
  connection.watch();
  auto run = [&gateway, work, body = connection.take_body()] { return work(body, gateway); };
  const std::optional<absl::StatusOr<Json>> json = co_await patience.run(pool, std::move(run));
  if (!json.has_value()) {
    co_await patience.give_up();
  } else if (json->ok()) {
    co_await connection.reply(200, dump_json(**json));
  } else {
    co_await connection.reply_error(json->status());
  }
}

}  // namespace

asio::awaitable<void> serve_tokenize(Gateway& gateway, HttpConnection& connection) {
  return answer_with(gateway, gateway.fetch_pool(), connection, tokenize);  // messages may name images by URL
}

asio::awaitable<void> serve_detokenize(Gateway& gateway, HttpConnection& connection) {
  return answer_with(gateway, gateway.pool(), connection, detokenize);
}

}  // namespace parvl
