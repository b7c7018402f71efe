#include "parvl/serve/serve_request.h"

#include <deque>
#include <optional>
#include <utility>

#include "parvl/base/log.h"
#include "parvl/serve/api_error.h"
#include "parvl/serve/gateway.h"
#include "parvl/serve/openai_reply.h"

namespace parvl {
namespace {

// What a generation has given out and nobody has taken yet. The engine's thread posts into it; the rest is the io
// thread's.
struct Deltas {
  std::shared_ptr<Wakeup> wakeup;  // the connection's
  std::deque<TokenEvent> events;
  std::optional<absl::StatusOr<GenerateResult>> end;
};

RequestId start_generation(Gateway& gateway, Prompt prompt, const ChatRequest& request,
                           const std::shared_ptr<Deltas>& deltas) {
  EngineRequest job;
  job.prompt = std::make_shared<const Prompt>(std::move(prompt));
  job.sampling = request.sampling;
  asio::io_context& io = gateway.io();
  job.on_token = [&io, deltas](const TokenEvent& event) {
    asio::post(io, [deltas, event] {
      deltas->events.push_back(event);
      deltas->wakeup->notify();
    });
  };
  job.on_end = [&gateway, &io, deltas](const absl::StatusOr<GenerateResult>& result) {
    asio::post(io, [&gateway, deltas, result] {
      gateway.generation_ended(result);
      deltas->end = result;
      deltas->wakeup->notify();
    });
  };
  return gateway.model().engine->submit(std::move(job));
}

// The answer as it grows: either streamed, or kept for one JSON object at the end.
class Answer {
 public:
  Answer(Gateway& gateway, HttpConnection& connection, const ChatRequest& request, const std::string& model)
      : tokenizer_(gateway.model().prompts().tokenizer()),
        connection_(connection),
        request_(request),
        format_("chatcmpl-" + gateway.random_hex(), model, gateway.clock().wall_ns() / 1'000'000'000,
                request.include_usage) {
    if (request.sampling.logprobs) logprobs_ = Json::array();
  }

  bool started() const { return started_; }

  // Takes every token that is there. The first one starts the stream.
  asio::awaitable<void> take(std::deque<TokenEvent>& events) {
    std::string out;
    for (TokenEvent& event : events) {
      ++usage_.completion_tokens;
      text_ += event.text;
      finish_ = event.finish;
      if (request_.sampling.logprobs) logprobs_.push_back(logprob_entry(event.logprob, tokenizer_));
      // Log-probabilities of a token whose text still waits go with the chunk that shows it.
      if (request_.stream && !text_.empty()) out += content();
    }
    events.clear();
    if (!request_.stream) co_return;
    if (!std::exchange(started_, true)) {
      co_await connection_.begin_stream();
      out = format_.role_event() + out;
    }
    co_await connection_.send(std::move(out));
  }

  asio::awaitable<void> finish(int64_t prompt_tokens) {
    if (finish_ == FinishReason::kNone) co_return co_await fail(failed("the generation ended without a reason"));
    usage_.prompt_tokens = prompt_tokens;
    if (!request_.stream) {
      co_await connection_.reply(200, format_.completion(text_, logprobs_, finish_, usage_));
      co_return;
    }
    std::string out;
    if (!logprobs_.empty()) out += content();  // of the end token, say
    out += format_.finish_event(finish_);
    if (request_.include_usage) out += format_.usage_event(usage_);
    co_await connection_.send(out + kDoneEvent);
    co_await connection_.end_stream();
  }

  // A status while nothing is out, an error event afterwards.
  asio::awaitable<void> fail(absl::Status status) {
    connection_.close_after_this();
    if (!started_) {
      co_await connection_.reply_error(std::move(status));
      co_return;
    }
    co_await connection_.send(error_event(error_body(status)));
    co_await connection_.end_stream();
  }

 private:
  std::string content() {
    Json logprobs = nullptr;
    if (request_.sampling.logprobs) logprobs = std::exchange(logprobs_, Json::array());
    return format_.content_event(std::exchange(text_, {}), logprobs);
  }

  const Tokenizer& tokenizer_;
  HttpConnection& connection_;
  const ChatRequest& request_;
  CompletionFormat format_;
  std::string text_;  // not sent yet
  Json logprobs_;     // null, or those not sent yet
  FinishReason finish_ = FinishReason::kNone;
  Usage usage_;
  bool started_ = false;
};

absl::Status shutting_down() {
  return api_error(503, "the server shut down before this request was finished", "draining");
}

}  // namespace

asio::awaitable<void> serve_chat(Gateway& gateway, HttpConnection& connection) {
  const auto cutting = [&gateway] { return gateway.state() == Gateway::State::kCutting; };
  const Gateway::ActiveRequest active(gateway, *connection.wakeup());

  // parse
  const LoadedModel& model = gateway.model();
  auto parse = [&model, body = connection.take_body()] { return parse_chat_request(body, model.rules); };
  absl::StatusOr<ChatRequest> request = co_await run_on(gateway.pool(), std::move(parse));
  if (!request.ok()) co_return co_await connection.reply_error(request.status());
  const std::string model_name = request->model.empty() ? gateway.options().served_names.front() : request->model;
  if (absl::Status status = gateway.check_model(model_name); !status.ok()) {
    co_return co_await connection.reply_error(std::move(status));
  }
  gateway.warn_unknown_fields(request->unknown_fields);
  if (!request->has_seed) request->sampling.seed = gateway.random_seed();

  // admit
  const auto ticket = gateway.admission().enter([&connection] { connection.wakeup()->notify(); });
  if (ticket == nullptr) {
    co_return co_await connection.reply_error(
        api_error(429, absl::StrCat("the queue is full: ", gateway.options().max_queue, " requests wait (--max-queue)"),
                  "queue_full"));
  }
  connection.watch();
  while (!ticket->has_credit() && !connection.gone() && !cutting()) co_await connection.wakeup()->wait();
  if (connection.gone()) co_return;
  if (cutting()) co_return co_await connection.reply_error(shutting_down());

  // preprocess
  auto prepare = [&] { return prepare_prompt(*request, model.prompts(), model.limits, gateway.options().media); };
  absl::StatusOr<Prompt> prompt = co_await run_on(gateway.pool(), prepare);
  request->messages.clear();  // as large as the body, and not needed any more
  request->images.clear();
  if (connection.gone()) co_return;
  if (!prompt.ok()) co_return co_await connection.reply_error(prompt.status());
  const int64_t prompt_tokens = static_cast<int64_t>(prompt->ids.size());

  // enqueue
  auto deltas = std::make_shared<Deltas>(Deltas{connection.wakeup(), {}, {}});
  const RequestId job = start_generation(gateway, std::move(*prompt), *request, deltas);

  // await deltas
  Answer answer(gateway, connection, *request, model_name);
  while (!connection.gone() && !cutting()) {
    if (!deltas->events.empty()) {
      co_await answer.take(deltas->events);
    } else if (deltas->end.has_value()) {
      break;
    } else {
      co_await connection.wakeup()->wait();
    }
  }

  // finish
  model.engine->cancel(job);  // no effect on one that has ended
  if (connection.gone()) co_return;
  if (!deltas->end.has_value() || !deltas->events.empty()) co_return co_await answer.fail(shutting_down());
  if (!deltas->end->ok()) {
    const absl::Status status = deltas->end->status();
    if (http_status_of(status) >= 500) log_warning("request ", connection.request_id(), " failed: ", status.message());
    co_return co_await answer.fail(status);
  }
  co_await answer.finish(prompt_tokens);
}

}  // namespace parvl
