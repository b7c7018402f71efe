#include "parvl/serve/load_client.h"

#include <unistd.h>

#include <boost/asio/posix/stream_descriptor.hpp>
#include <deque>
#include <optional>
#include <utility>

#include "parvl/base/json.h"
#include "parvl/base/log.h"
#include "parvl/serve/chat_stream.h"

namespace parvl {
namespace {

constexpr size_t kAheadRequests = 1024;  // made before they are due
constexpr size_t kAheadBytes = size_t{64} << 20;
constexpr std::chrono::seconds kProgress{4};      // between lines
constexpr int64_t kProbeWords = kLoadVocabulary;  // so that all words count alike
constexpr const char* kChatPath = "/v1/chat/completions";

// An exception inside a coroutine is a bug or a lack of memory: out of run_load with it.
void rethrow(std::exception_ptr error) {
  if (error) std::rethrow_exception(error);
}

class LoadRun {
 public:
  LoadRun(LoadTestOptions options, const Clock& clock)
      : options_(std::move(options)), clock_(clock), http_(io_, options_.http, clock) {}

  absl::StatusOr<LoadResult> run();

 private:
  // Before the test.
  asio::awaitable<absl::Status> get_ready();
  asio::awaitable<absl::Status> find_model();
  asio::awaitable<absl::Status> measure_words();
  asio::awaitable<absl::StatusOr<int64_t>> count_tokens(std::string text);
  asio::awaitable<absl::StatusOr<int64_t>> probe_prompt(std::string text);
  // The test: one coroutine makes requests ahead, one sends them when they are due, and one for each waits for its end.
  asio::awaitable<void> test();
  asio::awaitable<MetricsPage> scrape();
  asio::awaitable<void> make_ahead();
  asio::awaitable<void> send_all();
  asio::awaitable<void> send(size_t index, std::string body);
  void finish(LoadRecord& record, const ChatStream& stream, const HttpAnswer& answer, const absl::Status& stream_error);
  asio::awaitable<void> report_progress();
  void watch_stop_descriptor();
  void stop();

  bool all_made() const { return stopping_ || made_ == options_.due_s.size(); }
  bool ahead_is_full() const { return ahead_.size() >= kAheadRequests || ahead_bytes_ >= kAheadBytes; }
  double now_s() const { return clock_.now_seconds() - start_s_; }

  LoadTestOptions options_;
  const Clock& clock_;
  asio::io_context io_{1};
  HttpClient http_;
  asio::thread_pool maker_{1};
  Wakeup made_one_{io_}, took_one_{io_}, ended_one_{io_};
  asio::steady_timer due_{io_}, progress_{io_};
  std::optional<asio::posix::stream_descriptor> stop_signal_;

  absl::Status status_;
  LoadResult result_;
  std::deque<std::string> ahead_;  // bodies made and not yet sent
  size_t ahead_bytes_ = 0, made_ = 0;
  size_t open_ = 0, completed_ = 0, failed_ = 0;
  double start_s_ = 0;
  bool stopping_ = false;
};

absl::StatusOr<LoadResult> LoadRun::run() {
  PARVL_RETURN_IF_ERROR(http_.resolve());
  watch_stop_descriptor();
  asio::co_spawn(io_, test(), rethrow);
  asio::co_spawn(io_, report_progress(), rethrow);
  io_.run();
  if (!status_.ok()) return status_;
  return std::move(result_);
}

void LoadRun::watch_stop_descriptor() {
  if (options_.stop_descriptor < 0) return;
  stop_signal_.emplace(io_, ::dup(options_.stop_descriptor));
  stop_signal_->async_wait(asio::posix::stream_descriptor::wait_read, [this](const boost::system::error_code& error) {
    if (!error) stop();
  });
}

// Sends nothing more and cuts what is under way.
void LoadRun::stop() {
  stopping_ = true;
  due_.cancel();
  for (Wakeup* wakeup : {&made_one_, &took_one_, &ended_one_}) wakeup->notify();
  http_.cancel();
}

asio::awaitable<void> LoadRun::report_progress() {
  for (;;) {
    progress_.expires_after(kProgress);
    const auto [error] = co_await progress_.async_wait(kAwait);
    if (error) co_return;
    if (result_.records.empty()) {
      log_info("making requests: ", made_, " of ", options_.due_s.size());
    } else {
      log_info("requests: ", result_.records.size(), " of ", options_.due_s.size(), " begun, ", completed_,
               " completed, ", failed_, " failed, ", open_, " under way");
    }
  }
}

asio::awaitable<void> LoadRun::test() {
  status_ = co_await get_ready();
  if (stopping_) status_ = failed("interrupted before the first request was sent");
  if (status_.ok()) {
    result_.records.reserve(options_.due_s.size());  // send() keeps references
    asio::co_spawn(io_, make_ahead(), rethrow);
    while (!all_made() && !ahead_is_full()) co_await made_one_.wait();  // a lead to begin with
    const MetricsPage before = co_await scrape();
    const double scraped_s = clock_.now_seconds();
    co_await send_all();
    while (open_ > 0) co_await ended_one_.wait();
    const MetricsPage after = co_await scrape();
    if (!stopping_) result_.server = compare(before, after, clock_.now_seconds() - scraped_s);
  }
  progress_.cancel();
  if (stop_signal_) stop_signal_->cancel();
}

asio::awaitable<absl::Status> LoadRun::get_ready() {
  if (options_.model.empty()) {
    absl::Status found = co_await find_model();
    if (!found.ok()) co_return found;
  }
  result_.model = options_.model;
  bool has_text = false;
  for (const LoadRequest& request : options_.requests) has_text |= request.messages.empty() && request.text_tokens > 0;
  if (has_text) co_return co_await measure_words();
  co_return absl::OkStatus();
}

absl::Status refused(const std::string& path, const HttpAnswer& answer) {
  if (answer.status == 0) return failed("the server of --target does not answer: ", answer.detail);
  return failed("the server answers ", path, " with HTTP ", answer.status, ": ", error_message(answer.body));
}

asio::awaitable<absl::Status> LoadRun::find_model() {
  const HttpAnswer answer = co_await http_.exchange("/v1/models", "", nullptr);
  if (answer.status == 404) co_return absl::OkStatus();  // a server of one model may not list it
  if (answer.status != 200 || !answer.failure.empty()) co_return refused("/v1/models", answer);
  const absl::StatusOr<Json> models = parse_json(answer.body, "/v1/models");
  if (!models.ok()) co_return models.status();
  const Json::json_pointer first("/data/0/id");
  if (!models->contains(first) || !(*models)[first].is_string()) {
    co_return failed("the server lists no model under /v1/models; name one with --model");
  }
  options_.model = (*models)[first].get<std::string>();
  co_return absl::OkStatus();
}

// By the difference between two texts, so that what a template or a tokenizer adds to every text does not count.
asio::awaitable<absl::Status> LoadRun::measure_words() {
  int64_t counts[2] = {0, 0};
  for (int i = 0; i < 2; ++i) {
    const auto count = co_await count_tokens(load_text(options_.seed, 0, (i + 1) * kProbeWords));
    if (!count.ok()) co_return count.status();
    counts[i] = *count;
  }
  if (counts[1] <= counts[0]) {
    co_return failed("the server counts ", counts[0], " tokens in a text and ", counts[1],
                     " in one twice as long; its counts cannot be used to make texts of a given length");
  }
  result_.tokens_per_word = static_cast<double>(counts[1] - counts[0]) / static_cast<double>(kProbeWords);
  co_return absl::OkStatus();
}

asio::awaitable<absl::StatusOr<int64_t>> LoadRun::count_tokens(std::string text) {
  Json ask = {{"prompt", text}};
  if (!options_.model.empty()) ask["model"] = options_.model;
  const HttpAnswer answer = co_await http_.exchange("/tokenize", ask.dump(), nullptr);
  if (answer.status == 200 && answer.failure.empty()) {
    const absl::StatusOr<Json> json = parse_json(answer.body, "/tokenize");
    if (json.ok() && json->is_object() && json->contains("count")) {
      co_return json_value<int64_t>(*json, "count", 0);
    }
  }
  if (answer.status == 0) co_return refused("/tokenize", answer);
  co_return co_await probe_prompt(std::move(text));  // not every server has /tokenize
}

asio::awaitable<absl::StatusOr<int64_t>> LoadRun::probe_prompt(std::string text) {
  const Json messages = Json::array({{{"role", "user"}, {"content", text}}});
  ChatStream stream;
  absl::Status status;
  const auto on_body = [&](std::string_view bytes) { return status = stream.push(bytes, 0); };
  const HttpAnswer answer = co_await http_.exchange(kChatPath, chat_body(options_.model, messages.dump(), 1), on_body);
  if (answer.status != 200) co_return refused(kChatPath, answer);
  if (!status.ok()) co_return with_context(status, "the server's stream");
  if (!stream.has_usage()) {
    co_return failed("the server's streams carry no usage, though stream_options.include_usage asks for it");
  }
  co_return stream.prompt_tokens();
}

// Not every server has metrics.
asio::awaitable<MetricsPage> LoadRun::scrape() {
  const HttpAnswer answer = co_await http_.exchange("/metrics", "", nullptr);
  co_return answer.status == 200 && answer.failure.empty() ? parse_metrics(answer.body) : MetricsPage();
}

asio::awaitable<void> LoadRun::make_ahead() {
  LoadContent content({options_.model, options_.seed, options_.repeat_images, result_.tokens_per_word});
  while (!all_made()) {
    if (ahead_is_full()) {
      co_await took_one_.wait();
      continue;
    }
    const LoadRequest& request = options_.requests[made_ % options_.requests.size()];
    std::string body = co_await run_on(maker_, [&] { return content.body(request, made_); });
    ahead_bytes_ += body.size();
    ahead_.push_back(std::move(body));
    ++made_;
    made_one_.notify();
  }
}

asio::awaitable<void> LoadRun::send_all() {
  start_s_ = clock_.now_seconds();
  for (size_t i = 0; i < options_.due_s.size(); ++i) {
    while (options_.concurrency > 0 && open_ >= options_.concurrency && !stopping_) co_await ended_one_.wait();
    while (ahead_.empty() && !stopping_) co_await made_one_.wait();
    const double wait_s = options_.due_s[i] - now_s();
    if (options_.concurrency == 0 && wait_s > 0 && !stopping_) {
      due_.expires_after(std::chrono::nanoseconds(static_cast<int64_t>(wait_s * 1e9)));
      co_await due_.async_wait(kAwait);
    }
    if (stopping_) co_return;
    std::string body = std::move(ahead_.front());
    ahead_.pop_front();
    ahead_bytes_ -= body.size();
    took_one_.notify();
    LoadRecord& record = result_.records.emplace_back();
    if (options_.concurrency == 0) record.due_s = options_.due_s[i];
    record.asked_tokens = options_.requests[i % options_.requests.size()].output_tokens;
    if (options_.concurrency == 0 && open_ >= options_.max_open) {
      ++failed_;
      record.failure = "too many open";
      record.detail = absl::StrCat("not sent: ", open_, " requests were under way, the limit of --max-open");
      continue;
    }
    ++open_;
    asio::co_spawn(io_, send(i, std::move(body)), rethrow);
  }
}

asio::awaitable<void> LoadRun::send(size_t index, std::string body) {
  LoadRecord& record = result_.records[index];
  record.sent_s = now_s();
  ChatStream stream;
  absl::Status stream_error;
  const auto on_body = [&](std::string_view bytes) { return stream_error = stream.push(bytes, now_s()); };
  const HttpAnswer answer = co_await http_.exchange(kChatPath, std::move(body), on_body);
  finish(record, stream, answer, stream_error);
  (record.completed() ? completed_ : failed_) += record.unfinished ? 0 : 1;
  --open_;
  ended_one_.notify();
}

void LoadRun::finish(LoadRecord& record, const ChatStream& stream, const HttpAnswer& answer,
                     const absl::Status& stream_error) {
  record.end_s = now_s();
  const auto fail = [&record](std::string kind, std::string detail) {
    record.failure = std::move(kind);
    record.detail = std::move(detail);
  };
  if (answer.status != 0 && answer.status != 200) {
    fail(absl::StrCat("HTTP ", answer.status), error_message(answer.body));
  } else if (!stream_error.ok()) {
    fail("error in the stream", std::string(stream_error.message()));
  } else if (stream.done() && stream.has_usage()) {
    record.first_text_s = stream.first_text_s();
    record.end_s = stream.done_s();
    record.prompt_tokens = stream.prompt_tokens();
    record.output_tokens = stream.output_tokens();
    for (const float gap_ms : stream.gaps_ms()) result_.itl_ms.add(gap_ms);
  } else if (stream.done()) {
    fail("no usage", "the stream says nothing of its tokens, though stream_options.include_usage asks for it");
  } else if (stopping_) {
    record.unfinished = true;
    record.detail = "cut by the end of the test";
  } else if (!answer.failure.empty()) {
    fail(answer.failure, answer.detail);
  } else {
    fail("cut stream", "the answer ended without [DONE]");
  }
}

}  // namespace

absl::StatusOr<LoadResult> run_load(LoadTestOptions options, const Clock& clock) {
  absl::StatusOr<LoadResult> result = absl::UnknownError("not run");
  PARVL_RETURN_IF_ERROR(catch_exceptions("the load test", [&] {
    LoadRun run(std::move(options), clock);
    result = run.run();
    return absl::OkStatus();
  }));
  return result;
}

}  // namespace parvl
