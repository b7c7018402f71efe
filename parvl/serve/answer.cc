#include "parvl/serve/answer.h"

#include <algorithm>
#include <utility>

#include "parvl/serve/api_error.h"

namespace parvl {

Answer::Answer(HttpConnection& connection, const Tokenizer& tokenizer, const Options& options)
    : connection_(connection), options_(options), format_(options.head, tokenizer), choices_(options.choices) {
  for (size_t i = 0; i < choices_.size(); ++i) {
    choices_[i].choice.index = static_cast<int64_t>(i);
    if (options_.reads_calls) choices_[i].calls.emplace(options_.tools);
    if (!options_.echoes.empty())
      choices_[i].choice.text = options_.echoes[i * options_.echoes.size() / options.choices];
  }
}

void Answer::add_text(Growing& growing, const TokenEvent& event) const {
  Choice& choice = growing.choice;
  choice.finish = event.finish;
  if (!growing.calls.has_value()) {
    choice.text += event.text;
    return;
  }
  std::vector<ToolEvent> parts = growing.calls->push(event.text);
  if (event.finish != FinishReason::kNone) {
    for (ToolEvent& last : growing.calls->finish()) parts.push_back(std::move(last));
    choice.cut_in_call = growing.calls->inside_call();
  }
  for (ToolEvent& part : parts) {
    if (part.kind == ToolEvent::Kind::kText) {
      choice.text += part.text;
    } else if (part.kind == ToolEvent::Kind::kArguments) {
      choice.calls.back().arguments += part.text;
    } else {
      const std::string id = absl::StrCat(options_.head.id, "-", choice.index, "-", choice.calls.size());
      choice.calls.push_back({"call_" + id.substr(id.find('-') + 1), std::move(part.text), "", false});
    }
  }
}

asio::awaitable<void> Answer::take(std::deque<Delta>& deltas) {
  std::string out;
  for (Delta& delta : deltas) {
    ++completion_tokens_;
    Growing& growing = choices_[delta.choice];
    add_text(growing, delta.event);
    if (options_.head.logprobs) growing.choice.logprobs.push_back(std::move(delta.event.logprob));
    if (options_.stream) out += events_of(growing);
  }
  deltas.clear();
  if (!options_.stream) co_return;
  if (!std::exchange(started_, true)) connection_.begin_stream();
  co_await connection_.send(std::move(out));
}

// What a new token lets a stream show.
std::string Answer::events_of(Growing& growing) const {
  Choice& choice = growing.choice;
  const bool ends = choice.finish != FinishReason::kNone;
  std::string out;
  if (!std::exchange(growing.started, true)) out += format_.start_event(choice);
  // Log-probabilities of a token whose text still waits go with the chunk that shows it; those of the end token, which
  // shows nothing, with one of their own.
  if (!choice.text.empty()) out += format_.content_event(choice);
  if (!choice.calls.empty()) out += format_.calls_event(choice);
  if (ends && !choice.logprobs.empty()) out += format_.content_event(choice);
  if (ends) out += format_.finish_event(choice);
  return out;
}

asio::awaitable<void> Answer::finish(Usage usage) {
  const bool all_ended = std::all_of(choices_.begin(), choices_.end(), [](const Growing& growing) {
    return growing.choice.finish != FinishReason::kNone;
  });
  if (!all_ended) co_return co_await fail(failed("the generation ended without a reason"));
  usage.completion_tokens = completion_tokens_;
  if (!options_.stream) {
    std::vector<Choice> choices;
    for (Growing& growing : choices_) choices.push_back(std::move(growing.choice));
    co_await connection_.reply(200, format_.whole(choices, usage));
    co_return;
  }
  const std::string last = options_.head.include_usage ? format_.usage_event(usage) : "";
  co_await connection_.end_stream(last + kDoneEvent);
}

asio::awaitable<void> Answer::fail(absl::Status status) {
  connection_.close_after_this();
  if (!started_) {
    co_await connection_.reply_error(std::move(status));
    co_return;
  }
  co_await connection_.end_stream(error_event(error_body(status)));
}

}  // namespace parvl
