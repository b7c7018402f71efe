// The answer to one request as it grows: either streamed, or kept for one JSON object at the end. One thread.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "parvl/exec/engine.h"
#include "parvl/serve/http_connection.h"
#include "parvl/serve/openai_reply.h"
#include "parvl/serve/tool_parser.h"

namespace parvl {

// A token of one of the choices.
struct Delta {
  size_t choice = 0;
  TokenEvent event;
  double at_s = 0;  // when it came out of the engine
};

class Answer {
 public:
  struct Options {
    size_t choices = 1;
    bool stream = false;
    bool reads_calls = false;  // of tools, written in the syntax below
    ToolSyntax tools;
    std::vector<std::string> echoes;  // by prompt, what its answers begin with; may be empty
    ReplyFormat::Head head;
  };
  // `connection` and `tokenizer` must outlive it.
  Answer(HttpConnection& connection, const Tokenizer& tokenizer, const Options& options);

  // Takes every token that is there. The first one starts the stream.
  asio::awaitable<void> take(std::deque<Delta>& deltas);
  // After the last token of every choice. `usage` is of the prompts; the completions' tokens are added here.
  asio::awaitable<void> finish(Usage usage);
  // Instead of finish: a status while nothing is out, an error event afterwards.
  asio::awaitable<void> fail(absl::Status status);

 private:
  struct Growing {
    Choice choice;  // when streaming: what is not sent yet
    bool started = false;
    std::optional<ToolParser> calls;  // when the answer may hold calls
  };
  void add_text(Growing& growing, const TokenEvent& event) const;
  std::string events_of(Growing& growing) const;

  HttpConnection& connection_;
  Options options_;
  ReplyFormat format_;
  std::vector<Growing> choices_;
  int64_t completion_tokens_ = 0;
  bool started_ = false;
};

}  // namespace parvl
