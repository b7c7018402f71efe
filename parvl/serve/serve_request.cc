#include "parvl/serve/serve_request.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "parvl/base/log.h"
#include "parvl/serve/answer.h"
#include "parvl/serve/api_error.h"
#include "parvl/serve/gateway.h"
#include "parvl/serve/media_fetch.h"
#include "parvl/serve/patience.h"
#include "parvl/serve/request_row.h"
#include "parvl/serve/running_jobs.h"

namespace parvl {
namespace {

// Up to these, the io thread does it itself; a tenth of a millisecond or two.
constexpr size_t kSmallBody = 16u << 10, kSmallPrompt = 2u << 10;

// What a request's generations have given out and nobody has taken yet. The engine's thread posts into it; the rest is
// the io thread's.
struct Deltas {
  std::shared_ptr<Wakeup> wakeup;  // the connection's
  RequestTimer timer;
  const size_t n;  // choices a prompt
  std::deque<Delta> waiting;
  size_t running = 0;                                            // generations that have not ended
  absl::Status failure;                                          // of the first one that failed
  int64_t cached_tokens = 0;                                     // of the prompts
  std::vector<std::pair<std::string, std::string>> ran_on = {};  // of the first choice
  double last_s = 0;  // when the last token that was taken came out of the engine

  void came(Delta delta, int64_t prompt_tokens) {
    timer.token(delta.choice, prompt_tokens, delta.at_s);
    waiting.push_back(std::move(delta));
    wakeup->notify();
  }

  void ended(size_t choice, const absl::StatusOr<GenerateResult>& result) {
    --running;
    timer.ended(result);
    if (failure.ok()) failure = engine_error(result.status());
    const bool first = choice % n == 0;  // of its prompt; the others find what this one computed, which is no news
    if (result.ok() && first) cached_tokens += result->cached_tokens;
    if (result.ok() && choice == 0) ran_on = result->ran_on;
    wakeup->notify();
  }
};

// One generation of `job`, for the next choice.
void start_generation(Gateway& gateway, EngineRequest job, RunningJobs& jobs, const std::shared_ptr<Deltas>& deltas) {
  asio::io_context& io = gateway.io();
  const size_t choice = jobs.size();
  const auto prompt_tokens = static_cast<int64_t>(job.prompt->ids.size());
  job.on_token = [&io, &clock = gateway.clock(), deltas, choice, prompt_tokens](const TokenEvent& event) {
    asio::post(io, [deltas, prompt_tokens, delta = Delta{choice, event, clock.now_seconds()}]() mutable {
      deltas->came(std::move(delta), prompt_tokens);
    });
  };
  job.on_end = [&gateway, &io, deltas, choice](const absl::StatusOr<GenerateResult>& result) {
    asio::post(io, [&gateway, deltas, choice, result] {
      gateway.generation_ended(result);
      deltas->ended(choice, result);
    });
  };
  ++deltas->running;
  jobs.submit(std::move(job));
}

bool names_web_items(const GenerateRequest& request) {
  return std::any_of(request.images.begin(), request.images.end(),
                     [](const MediaReference& image) { return is_web_url(image.url); });
}

struct PreparedRequest {
  std::vector<Prompt> prompts;
  std::vector<std::string> echoes = {};       // by prompt, when the answers repeat them
  double media_begin_s = 0, media_end_s = 0;  // from the asking for its images to their end; 0 without
};

// The grammar that the request asks for, null when it asks for none. Compiling one may take seconds, in which the
// request has its place in the line, but takes nobody's turn. None once the request is over.
asio::awaitable<std::optional<GrammarCompiler::Result>> make_grammar(Gateway& gateway, Patience& patience,
                                                                     const GenerateRequest& request,
                                                                     Admission::Ticket& ticket) {
  if (request.grammar.empty()) co_return GrammarCompiler::Result(nullptr);
  GrammarCompiler& grammars = gateway.model().engine->grammars();
  std::optional<GrammarCompiler::Result> made = grammars.find(request.grammar);
  if (!made.has_value()) {
    auto compile = [&grammars, source = request.grammar, stop = patience.stop_token()] {
      return grammars.compile(source, stop);
    };
    made = co_await patience.run(gateway.grammar_pool(), std::move(compile));
  }
  ticket.set_ready();
  if (made.has_value() && absl::IsInvalidArgument(made->status())) {
    made = api_error(400, absl::StrCat("'", request.grammar_field, "': ", made->status().message()), "",
                     request.grammar_field);
  }
  co_return made;
}

// `n` generations a prompt, which it takes out of `prepared`, whose seeds follow each other.
void start_generations(Gateway& gateway, PreparedRequest& prepared, const GenerateRequest& request,
                       const std::shared_ptr<const Grammar>& grammar, const RequestRow& row,
                       const std::shared_ptr<Deltas>& deltas, RunningJobs& jobs) {
  for (Prompt& prompt : prepared.prompts) {
    EngineRequest job;
    job.prompt = std::make_shared<const Prompt>(std::move(prompt));
    job.sampling = request.sampling;
    job.grammar = grammar;
    if (!request.has_seed) job.sampling.seed = gateway.random_seed();
    job.priority = request.priority;
    job.cache_salt = request.cache_salt;
    for (int64_t i = 0; i < request.n; ++i, ++job.sampling.seed) {
      job.track = row.of_choice(jobs.size());
      start_generation(gateway, job, jobs, deltas);
    }
  }
  deltas->timer.submitted();
}

Answer::Options answer_options(Gateway& gateway, const GenerateRequest& request, const std::string& model_name,
                               std::vector<std::string> echoes) {
  Answer::Options options;
  options.choices = static_cast<size_t>(request.choices);
  options.stream = request.stream;
  options.echoes = std::move(echoes);
  options.reads_calls = request.reads_calls;
  options.tools = gateway.model().rules.tools;
  options.head.api = request.api;
  options.head.id = (request.api == Api::kChat ? "chatcmpl-" : "cmpl-") + gateway.random_hex();
  options.head.model = model_name;
  options.head.created = gateway.clock().wall_ns() / 1'000'000'000;
  options.head.logprobs = request.sampling.logprobs;
  options.head.include_usage = request.include_usage;
  return options;
}

Admission::Entry entry_of(const GenerateRequest& request, const Gateway& gateway, double received_s) {
  const QueueKind kind = request.images.empty() ? QueueKind::kText : QueueKind::kImage;
  Admission::Entry entry = {static_cast<size_t>(request.choices), request.priority, kind, request.grammar.empty()};
  const auto& deadline = gateway.options().queues[index_of(kind)].deadline;
  if (deadline.has_value()) entry.deadline_s = received_s + deadline->count();
  return entry;
}

Usage usage_of(const PreparedRequest& prepared) {
  Usage usage;
  for (const Prompt& prompt : prepared.prompts) usage.prompt_tokens += static_cast<int64_t>(prompt.ids.size());
  return usage;
}

// Nobody waits for an encoder that is gone, least of all with a turn that others need.
absl::Status accepts_media(const Gateway& gateway, const GenerateRequest& request) {
  return request.images.empty() ? absl::OkStatus() : gateway.accepts_images();
}

absl::Status check_request(const Gateway& gateway, const GenerateRequest& request, const std::string& model_name) {
  PARVL_RETURN_IF_ERROR(gateway.check_model(model_name));
  return accepts_media(gateway, request);
}

asio::awaitable<void> turn_away(Gateway& gateway, HttpConnection& connection, Refusal refusal, std::string message) {
  gateway.metrics().refused(refusal);
  co_await connection.reply_error(api_error(429, message, kRefusalNames[static_cast<size_t>(refusal)]),
                                  retry_after(gateway));
}

// Until every generation has ended, one has failed, or the request is over.
asio::awaitable<void> take_all(Deltas& deltas, Answer& answer, HttpConnection& connection, const Patience& patience,
                               bool stream) {
  while (!patience.over()) {
    if (!deltas.waiting.empty()) {
      deltas.last_s = deltas.waiting.back().at_s;
      const double first_s = deltas.waiting.front().at_s;
      co_await answer.take(deltas.waiting);
      if (stream) deltas.timer.answered(first_s);
    } else if (deltas.running == 0 || !deltas.failure.ok()) {
      break;
    } else {
      co_await connection.wakeup()->wait();
    }
  }
}

void log_failure(const HttpConnection& connection, const absl::Status& failure) {
  if (http_status_of(failure) < 500) return;
  log_line(LogLevel::kWarning, absl::StrCat("a request failed: ", failure.message()), connection.log_fields());
}

// What is known of the prompts once all is generated.
void complete(Usage& usage, const Deltas& deltas, const Gateway& gateway, const HttpConnection& connection) {
  usage.cached_tokens = deltas.cached_tokens;
  usage.ran_on = deltas.ran_on;
  if (!gateway.options().log_requests || usage.ran_on.empty()) return;
  LogFields fields = connection.log_fields();
  for (const auto& [module, where] : usage.ran_on) fields.emplace_back(module, where);
  log_line(LogLevel::kInfo, "generated", fields);
}

std::string queue_full(const Gateway& gateway, QueueKind kind) {
  const int64_t limit = gateway.options().queue_limit(index_of(kind));
  const bool own = gateway.options().queues[index_of(kind)].limit.has_value();
  const std::string name(kQueueNames[index_of(kind)]);
  return absl::StrCat("the queue is full: ", limit, " ", name, limit == 1 ? " request waits" : " requests wait", " (",
                      own ? "queues." + name + ".limit" : "--max-queue", ")");
}

std::string too_many_tokens(const Admission& admission, int64_t prompt_tokens) {
  return absl::StrCat("the requests that are prepared hold ", admission.tokens(), " prompt tokens, and with the ",
                      prompt_tokens, " of this one it would be more than ", admission.limits().tokens,
                      " (--max-queue-tokens)");
}

// Whether its text becomes tokens faster than another thread hears of it. The body's size counts, since all that is in
// it but the images goes through the chat template: tools and calls as well as text.
bool is_small(const GenerateRequest& request) {
  size_t images = 0;
  for (const MediaReference& image : request.images) images += image.url.size();
  return request.body_bytes <= images + kSmallPrompt;
}

// A small body is parsed here: to go to another thread and back would take longer. None once the request is over.
asio::awaitable<std::optional<absl::StatusOr<GenerateRequest>>> parse_body(Gateway& gateway, Patience& patience,
                                                                           std::string body, Api api) {
  const bool small = body.size() <= kSmallBody;
  auto parse = [&gateway, body = std::move(body), api] { return parse_request(body, api, gateway.model().rules); };
  if (small) co_return parse();
  co_return co_await patience.run(gateway.pool(), std::move(parse));
}

std::vector<std::string> texts_of(const std::vector<PlainPrompt>& prompts, const Tokenizer& tokenizer) {
  std::vector<std::string> texts;
  for (const PlainPrompt& prompt : prompts) {
    const auto* ids = std::get_if<std::vector<TokenId>>(&prompt);
    texts.push_back(ids != nullptr ? tokenizer.decode(*ids, false) : std::get<std::string>(prompt));
  }
  return texts;
}

// What `work` returns; little work is done here, the rest on a thread of the pool.
template <typename Work>
asio::awaitable<std::optional<std::invoke_result_t<Work&>>> run_here_or_there(Gateway& gateway, Patience& patience,
                                                                              bool here, Work work) {
  if (here) co_return work();
  co_return co_await patience.run(gateway.pool(), std::move(work));
}

// None once the request is over; what has begun then goes on with its own hold on `request`. So do the next two.
asio::awaitable<std::optional<absl::StatusOr<PreparedRequest>>> prepare_plain(
    Gateway& gateway, Patience& patience, const std::shared_ptr<GenerateRequest>& request) {
  auto work = [&gateway, request, stop = patience.stop_token()]() -> absl::StatusOr<PreparedRequest> {
    PreparedRequest out;
    PARVL_ASSIGN_OR_RETURN(out.prompts, gateway.prompt_maker(stop).prepare_plain(*request));
    if (request->echo) out.echoes = texts_of(request->prompts, gateway.model().prompts().tokenizer());
    return out;
  };
  co_return co_await run_here_or_there(gateway, patience, is_small(*request), std::move(work));
}

// The text becomes tokens while the images are fetched and decoded.
asio::awaitable<std::optional<absl::StatusOr<PreparedRequest>>> prepare_chat(
    Gateway& gateway, Patience& patience, const std::shared_ptr<GenerateRequest>& request) {
  PreparedRequest out;
  const std::stop_token stop = patience.stop_token();
  auto load = [&gateway, request, stop] {
    auto images = gateway.prompt_maker(stop).load_images(*request);
    return std::pair(std::move(images), gateway.clock().now_seconds());
  };
  std::optional<Patience::Begun<decltype(load)>> loading;
  if (!request->images.empty()) {
    out.media_begin_s = gateway.clock().now_seconds();  // from here on it waits for them, for a thread first
    loading.emplace(patience.begin(names_web_items(*request) ? gateway.fetch_pool() : gateway.pool(), std::move(load)));
  }
  auto write = [&gateway, request, stop] { return gateway.prompt_maker(stop).write_chat(*request); };
  auto text = co_await run_here_or_there(gateway, patience, is_small(*request), std::move(write));
  if (!text.has_value()) co_return std::nullopt;
  if (!text->ok()) co_return text->status();
  ProcessedImages images;
  if (loading.has_value()) {
    auto loaded = co_await patience.finish(*std::exchange(loading, std::nullopt));
    if (!loaded.has_value()) co_return std::nullopt;
    if (!loaded->first.ok()) co_return loaded->first.status();
    images = *std::move(loaded->first);
    out.media_end_s = loaded->second;
  }
  auto prompt = gateway.prompt_maker(stop).place(**std::move(text), std::move(images));
  if (!prompt.ok()) co_return prompt.status();
  out.prompts.push_back(*std::move(prompt));
  co_return out;
}

// Messages and media become prompts.
asio::awaitable<std::optional<absl::StatusOr<PreparedRequest>>> prepare(
    Gateway& gateway, Patience& patience, const std::shared_ptr<GenerateRequest>& request) {
  // Again: while it waited in the line, they may have gone.
  if (absl::Status status = accepts_media(gateway, *request); !status.ok()) co_return status;
  std::optional<absl::StatusOr<PreparedRequest>> prepared;  // no ?: around co_await: GCC 12 destroys its result twice
  if (request->api == Api::kChat) {
    prepared = co_await prepare_chat(gateway, patience, request);
  } else {
    prepared = co_await prepare_plain(gateway, patience, request);
  }
  // As large as the body, and not needed any more. After a failure a thread may still be at its images.
  if (prepared.has_value() && prepared->ok()) request->forget_inputs();
  co_return prepared;
}

}  // namespace

asio::awaitable<void> serve_request(Gateway& gateway, HttpConnection& connection, Api api) {
  const Gateway::ActiveRequest active(gateway, *connection.wakeup());
  const RequestRow row(gateway, connection);
  RequestTimer timer(gateway.metrics(), gateway.clock(), connection.received_s(), row.timeline(), row.track());
  Patience patience(gateway, connection);

  // parse
  const LoadedModel& model = gateway.model();
  auto parsed = co_await parse_body(gateway, patience, connection.take_body(), api);
  if (!parsed.has_value()) co_return co_await patience.give_up();
  if (!parsed->ok()) co_return co_await connection.reply_error(parsed->status());
  const auto request = std::make_shared<GenerateRequest>(**std::move(parsed));
  const std::string model_name = request->model.empty() ? gateway.options().served_names.front() : request->model;
  if (absl::Status status = check_request(gateway, *request, model_name); !status.ok()) {
    co_return co_await connection.reply_error(std::move(status));
  }
  gateway.warn_unknown_fields(request->unknown_fields);
  timer.lap(Stage::kPreprocess);

  // admit
  const Admission::Entry entry = entry_of(*request, gateway, connection.received_s());
  const auto ticket = gateway.admission().enter(entry, [&connection] { connection.wakeup()->notify(); });
  if (ticket == nullptr) {
    co_return co_await turn_away(gateway, connection, Refusal::kQueueFull, queue_full(gateway, entry.kind));
  }
  connection.watch();
  patience.start_waiting();
  const auto grammar = co_await make_grammar(gateway, patience, *request, *ticket);
  if (!patience.over() && !grammar->ok()) co_return co_await connection.reply_error(grammar->status());
  if (!co_await patience.wait_for_turn(*ticket)) co_return;
  patience.stop_waiting();
  timer.lap(Stage::kQueue);

  // preprocess
  auto made = co_await prepare(gateway, patience, request);
  if (patience.over()) co_return co_await patience.give_up();
  if (!made->ok()) co_return co_await connection.reply_error(made->status());
  PreparedRequest& prepared = **made;
  timer.lap(Stage::kPreprocess);
  timer.media(prepared.media_begin_s, prepared.media_end_s);
  Usage usage = usage_of(prepared);

  // enqueue
  if (!ticket->take_tokens(static_cast<size_t>(usage.prompt_tokens))) {
    co_return co_await turn_away(gateway, connection, Refusal::kTooManyTokens,
                                 too_many_tokens(gateway.admission(), usage.prompt_tokens));
  }
  auto deltas = std::make_shared<Deltas>(Deltas{connection.wakeup(), timer, static_cast<size_t>(request->n)});
  RunningJobs jobs(*model.engine, gateway.stop_token());
  start_generations(gateway, prepared, *request, **grammar, row, deltas, jobs);
  ticket->leave_line();

  // await deltas
  Answer answer(connection, model.prompts().tokenizer(),
                answer_options(gateway, *request, model_name, std::move(prepared.echoes)));
  co_await take_all(*deltas, answer, connection, patience, request->stream);

  // finish
  jobs.cancel();
  if (connection.gone()) co_return;
  if (!deltas->failure.ok()) {
    log_failure(connection, deltas->failure);
    co_return co_await answer.fail(deltas->failure);
  }
  if (deltas->running > 0 || !deltas->waiting.empty()) co_return co_await answer.fail(patience.why());
  complete(usage, *deltas, gateway, connection);
  co_await answer.finish(usage);
  deltas->timer.answered(deltas->last_s);
}

}  // namespace parvl
