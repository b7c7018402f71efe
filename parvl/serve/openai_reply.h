// What an answer looks like on the wire. Pure, but for the tokenizer that it reads.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "parvl/base/json.h"
#include "parvl/media/tokenizer.h"
#include "parvl/sched/sampling.h"
#include "parvl/serve/openai_request.h"

namespace parvl {

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of the prompt's
  int64_t completion_tokens = 0;
  std::vector<std::pair<std::string, std::string>> ran_on = {};  // module, where; told when there is a choice
};

// A call of a tool in an answer.
struct CallText {
  std::string id, name;
  std::string arguments;   // JSON; when streaming, what is not shown yet
  bool announced = false;  // a stream has shown id and name
};

// One of the answers to a request: all of it, or what a stream has not shown yet.
struct Choice {
  int64_t index = 0;
  std::string text;
  std::vector<CallText> calls;
  bool cut_in_call = false;  // it ended, by a stop string say, before its last call did
  std::vector<TokenLogprob> logprobs;
  int64_t text_offset = 0;  // characters that the tokens before those of `logprobs` show
  FinishReason finish = FinishReason::kNone;
};

// One reply's unchanging part, and the texts made with it.
class ReplyFormat {
 public:
  struct Head {
    Api api = Api::kChat;
    std::string id, model;
    int64_t created = 0;         // seconds since 1970
    bool logprobs = false;       // were asked for
    bool include_usage = false;  // chunks carry "usage": null, as OpenAI's do when usage was asked for
  };
  // `tokenizer` must outlive it.
  ReplyFormat(Head head, const Tokenizer& tokenizer) : head_(std::move(head)), tokenizer_(tokenizer) {}

  // Server-sent events ("data: {...}\n\n").
  std::string start_event(const Choice& choice) const;  // "" where nothing announces a choice
  // Takes text and log-probabilities out of the choice.
  std::string content_event(Choice& choice) const;
  // What is new of its calls, which it takes out; "" when nothing is. The log-probabilities too.
  std::string calls_event(Choice& choice) const;
  std::string finish_event(const Choice& choice) const;
  std::string usage_event(const Usage& usage) const;

  std::string whole(const std::vector<Choice>& choices, const Usage& usage) const;

 private:
  bool chat() const { return head_.api == Api::kChat; }
  Json reply(const char* chat_object, Json choices) const;
  std::string chunk_event(Json choices, Json usage) const;
  std::string choice_event(Json choice) const;
  Json take_logprobs(Choice& choice) const;
  int64_t shown_characters(TokenId id) const;
  Json logprobs_json(const Choice& choice) const;
  Json chat_logprobs(const Choice& choice) const;
  Json completion_logprobs(const Choice& choice) const;

  Head head_;
  const Tokenizer& tokenizer_;
};

inline constexpr char kDoneEvent[] = "data: [DONE]\n\n";
// `event: error` with the error object as data.
std::string error_event(const std::string& error_body);

}  // namespace parvl
