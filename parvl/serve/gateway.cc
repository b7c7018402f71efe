#include "parvl/serve/gateway.h"

#include <absl/strings/ascii.h>
#include <absl/strings/str_split.h>

#include <algorithm>
#include <utility>

#include "parvl/base/log.h"
#include "parvl/base/text.h"
#include "parvl/serve/api_error.h"
#include "parvl/serve/fleet_status.h"
#include "parvl/serve/serve_request.h"
#include "parvl/serve/tokenize.h"

namespace parvl {
namespace {

constexpr size_t kPoolThreads = 2;        // parse, decode, tokenise
constexpr size_t kFetchThreads = 16;      // prompts with items by http and https URL
constexpr size_t kMaxWarnedFields = 256;  // a client cannot grow the list for ever
constexpr size_t kMaxLoggedPath = 256;

constexpr char kModels[] = "/v1/models";
constexpr char kStartProfile[] = "/start_profile", kStopProfile[] = "/stop_profile";  // as vLLM has them
constexpr char kMetrics[] = "/metrics";
constexpr char kOk[] = R"({"status":"ok"})";
constexpr char kGet[] = "GET, HEAD, OPTIONS";
constexpr char kPost[] = "POST, OPTIONS";

struct Route {
  std::string_view path;
  const char* methods;
  bool needs_model = false;
};
constexpr Route kRoutes[] = {{"/v1/chat/completions", kPost, true},
                             {"/v1/completions", kPost, true},
                             {"/tokenize", kPost, true},
                             {"/detokenize", kPost, true},
                             {kModels, kGet, true},
                             {"/livez", kGet},
                             {"/readyz", kGet},
                             {"/health", kGet},
                             {"/version", kGet},
                             {kMetrics, kGet},
                             {kStartProfile, kPost},
                             {kStopProfile, kPost},
                             {"*", "GET, HEAD, POST, OPTIONS"}};  // the server as a whole

// nullptr: there is none.
const Route* route_of(std::string_view path) {
  if (path.starts_with(kModels) && path.substr(sizeof kModels - 1).starts_with('/')) path = kModels;
  const auto* found =
      std::find_if(std::begin(kRoutes), std::end(kRoutes), [&](const Route& r) { return r.path == path; });
  return found == std::end(kRoutes) ? nullptr : found;
}

ModalityQueue::Shares shares_of(const ServeOptions& options) {
  ModalityQueue::Shares out;
  for (size_t i = 0; i < out.size(); ++i) out[i] = options.queues[i].share;
  return out;
}

// Without an allocation this process is as good as a pool, with one instance that holds everything.
std::vector<PoolInfo> pools_of(const ServeOptions& options) {
  if (options.fleet != nullptr) return options.fleet->pools();
  return {{.name = "colocated", .modules = {"vision_encoder", "projector", "llm_backbone"}}};
}

bool is_probe(std::string_view path) { return path == "/livez" || path == "/readyz" || path == "/health"; }

}  // namespace

LoadedModel::LoadedModel(std::unique_ptr<Engine> loaded, int64_t max_images) : engine(std::move(loaded)) {
  limits = prompt_limits(*engine);
  rules.defaults = engine->default_sampling();
  rules.vocab_size = prompts().tokenizer().vocab_size();
  rules.takes_images = prompts().has_images();
  rules.why_no_images = prompts().why_no_images();
  rules.max_images = max_images;
  rules.tools = prompts().tool_syntax();
  const auto is_added = [&](const char* text) {
    return prompts().tokenizer().is_added(prompts().tokenizer().id_of(text));
  };
  rules.fills_in = std::all_of(std::begin(kFillInTokens), std::end(kFillInTokens), is_added);
}

Gateway::Gateway(asio::io_context& io, const ServeOptions& options, const Clock& clock)
    : io_(io),
      options_(options),
      clock_(clock),
      rng_(options.seed),
      admission_({}, clock, shares_of(options)),
      metrics_(pools_of(options), options.served_names.front()),
      pool_(kPoolThreads),
      fetch_pool_(kFetchThreads),
      grammar_pool_(1),
      created_(clock.wall_ns() / 1'000'000'000),
      keys_(options.api_keys) {}

Gateway::~Gateway() = default;

void Gateway::stop() {
  when_idle_ = nullptr;
  admission_.close();
  stop_fetching_.request_stop();
  asio::thread_pool* const pools[] = {&pool_, &fetch_pool_, &grammar_pool_};
  for (asio::thread_pool* pool : pools) pool->stop();  // else join() would run all that waits in it
  for (asio::thread_pool* pool : pools) pool->join();
  model_.reset();
}

std::string Gateway::random_hex() {
  return absl::StrCat(absl::Hex(rng_.next(), absl::kZeroPad16), absl::Hex(rng_.next(), absl::kZeroPad16));
}

absl::Status Gateway::check_key(const HttpConnection& connection) const {
  if (keys_.empty() || is_probe(connection.path())) return absl::OkStatus();
  const std::string_view header = connection.header("Authorization");
  if (keys_.find(header).has_value()) return absl::OkStatus();
  return api_error(
      401,
      BearerKeys::is_bearer(header) ? "the API key is not valid" : "an API key is needed: `Authorization: Bearer KEY`",
      "invalid_api_key");
}

absl::Status Gateway::accepts() const {
  switch (state_) {
    case State::kReady:
      return engine_error(model_->engine->accepts());
    case State::kLoading:
      return api_error(503, "the model is still loading", "loading");
    case State::kDraining:
    case State::kCutting:
      break;
  }
  return api_error(503, "the server is shutting down", "draining");
}

absl::Status Gateway::will_accept() const { return engine_error(model_->engine->will_accept()); }

absl::Status Gateway::accepts_images() const { return engine_error(model_->engine->accepts_images()); }

absl::Status Gateway::health() const {
  PARVL_RETURN_IF_ERROR(accepts());
  PARVL_RETURN_IF_ERROR(engine_error(model_->engine->health()));
  if (failure_.empty()) return absl::OkStatus();
  return api_error(503, "the last generation failed: " + failure_, "generation_failed");
}

std::string Gateway::allowed_methods(std::string_view path) const {
  const Route* route = route_of(path);
  if (options_.timeline == nullptr && (path == kStartProfile || path == kStopProfile)) return "";
  return route == nullptr ? "" : route->methods;
}

absl::Status Gateway::check_method(const HttpConnection& connection) const {
  if (connection.method() == http::verb::unknown) {
    return api_error(501, "this server knows GET, HEAD, POST and OPTIONS only", "unknown_method");
  }
  const std::string_view path = connection.path();
  const std::string allowed = allowed_methods(path);
  const auto name = http::to_string(connection.method());
  const std::string method(name.data(), name.size());
  if (allowed.empty() || (path == "*" && method != "OPTIONS")) {
    return api_error(404, absl::StrCat("there is no route ", excerpt(path)), "route_not_found");
  }
  const std::vector<std::string> methods = absl::StrSplit(allowed, ", ");
  if (std::find(methods.begin(), methods.end(), method) != methods.end()) return absl::OkStatus();
  return api_error(405, absl::StrCat(std::string(path), " answers ", methods.front(), " only"), "method_not_allowed");
}

absl::Status Gateway::check(const HttpConnection& connection) {
  PARVL_RETURN_IF_ERROR(check_key(connection));
  PARVL_RETURN_IF_ERROR(check_method(connection));
  const bool needs_model = route_of(connection.path())->needs_model;
  return needs_model && connection.method() != http::verb::options ? accepts() : absl::OkStatus();
}

asio::awaitable<void> Gateway::handle(HttpConnection& connection) {
  if (state_ == State::kDraining || state_ == State::kCutting) connection.close_after_this();
  const std::string_view path = connection.path();
  if (connection.method() == http::verb::options) {
    co_await connection.reply_methods();
  } else if (connection.method() == http::verb::post) {
    if (path == kStartProfile) co_return co_await reply_profile(connection, true);
    if (path == kStopProfile) co_return co_await reply_profile(connection, false);
    absl::Status status = accepts();  // again: the body may have taken its time
    if (!status.ok()) co_return co_await connection.reply_error(std::move(status));
    if (path == "/tokenize") co_return co_await serve_tokenize(*this, connection);
    if (path == "/detokenize") co_return co_await serve_detokenize(*this, connection);
    co_await serve_request(*this, connection, path == "/v1/completions" ? Api::kCompletions : Api::kChat);
  } else if (path == "/livez") {
    co_await connection.reply(200, kOk);
  } else if (path == "/version") {
    const Json version = {{"version", options_.version}};
    co_await connection.reply(200, dump_json(version));
  } else if (is_probe(path)) {
    co_await reply_health(connection);
  } else if (path == kMetrics) {
    co_await reply_metrics(connection);
  } else {
    co_await reply_models(connection);
  }
}

asio::awaitable<void> Gateway::reply_health(HttpConnection& connection) {
  if (absl::Status status = health(); !status.ok()) {
    co_await connection.reply_error(std::move(status));
  } else {
    co_await connection.reply(200, kOk);
  }
}

asio::awaitable<void> Gateway::reply_metrics(HttpConnection& connection) {
  const EngineStats stats = model_ == nullptr ? EngineStats{} : model_->engine->stats();
  for (size_t i = 0; i < kQueueNames.size(); ++i) {
    metrics_.waiting(static_cast<QueueKind>(i), admission_.waiting(static_cast<QueueKind>(i)));
  }
  const std::vector<EngineStats> by_pool = options_.fleet == nullptr ? std::vector{stats} : options_.fleet->stats();
  std::string text = metrics_.text(stats, by_pool, static_cast<int64_t>(admission_.in_line()), health().ok());
  if (options_.fleet != nullptr) text += fleet_metrics(options_.fleet->pools(), options_.fleet->instances());
  HttpConnection::Headers headers;
  headers["Content-Type"] = "text/plain; version=0.0.4; charset=utf-8";
  co_await connection.reply(200, std::move(text), std::move(headers));
}

asio::awaitable<void> Gateway::reply_profile(HttpConnection& connection, bool start) {
  const absl::StatusOr<std::string> path = start ? options_.timeline->start() : options_.timeline->stop();
  if (!path.ok()) {
    const bool taken = absl::IsFailedPrecondition(path.status());
    co_return co_await connection.reply_error(
        api_error(taken ? 409 : 500, std::string(path.status().message()), taken ? "trace_state" : "trace_unwritable"));
  }
  log_info(start ? "a trace is being recorded to " : "a trace is whole: ", *path);
  const Json file = {{"file", *path}};
  co_await connection.reply(200, dump_json(file));
}

Json Gateway::model_card(const std::string& name) const {
  const Engine& engine = *model_->engine;
  Json modules = Json::object();
  for (const auto& [module, where] : engine.places()) {
    const std::string before = modules.contains(module) ? modules[module].get<std::string>() + ", " : "";
    modules[module] = before + where;
  }
  return {{"id", name},
          {"object", "model"},
          {"created", created_},
          {"owned_by", "parvl"},
          {"root", options_.model_dir},
          {"parent", nullptr},
          {"max_model_len", engine.max_model_len()},
          {"parvl", {{"modules", std::move(modules)}}}};
}

asio::awaitable<void> Gateway::reply_models(HttpConnection& connection) {
  if (connection.path() == kModels) {
    Json list = Json::array();
    for (const std::string& name : options_.served_names) list.push_back(model_card(name));
    const Json models = {{"object", "list"}, {"data", std::move(list)}};
    co_await connection.reply(200, dump_json(models));
    co_return;
  }
  const std::string name = percent_decode(connection.path().substr(sizeof kModels));
  if (absl::Status status = check_model(name); !status.ok()) {
    co_await connection.reply_error(std::move(status));
  } else {
    co_await connection.reply(200, dump_json(model_card(name)));
  }
}

absl::Status Gateway::check_model(const std::string& name) const {
  const auto& names = options_.served_names;
  if (std::find(names.begin(), names.end(), name) != names.end()) return absl::OkStatus();
  return api_error(404, absl::StrCat("there is no model ", excerpt(name), "; this server answers as ", names.front()),
                   "model_not_found", "model");
}

void Gateway::warn_unknown_fields(const std::vector<std::string>& fields) {
  for (const std::string& field : fields) {
    if (warned_fields_.size() >= kMaxWarnedFields) return;
    const std::string name = excerpt(field);
    if (warned_fields_.insert(name).second)
      log_warning("requests carry the unknown field ", name, ", which has no effect");
  }
}

void Gateway::finished(const HttpConnection& connection, int http_status) {
  if (is_probe(connection.path()) || connection.path() == kMetrics) return;  // they come all the time
  metrics_.responded(http_status);
  if (!options_.log_requests) return;
  LogFields fields = connection.log_fields();
  const auto method = http::to_string(connection.method());
  fields.emplace_back("method", std::string(method.data(), method.size()));
  fields.emplace_back("path", shorten(connection.path(), kMaxLoggedPath));
  if (http_status != 0) fields.emplace_back("status", int64_t{http_status});
  fields.emplace_back("seconds", connection.seconds());
  log_line(LogLevel::kInfo, http_status == 0 ? "the client left" : "answered", fields);
}

void Gateway::model_loaded(std::unique_ptr<LoadedModel> model) {
  model_ = std::move(model);
  const ToolSyntax& tools = model_->rules.tools;
  if (tools.family.empty()) {
    log_info("tools: none; the chat template knows none, or writes calls in a form that is not known here");
  } else {
    log_info("tools: calls in the form ", tools.family, tools.parallel ? "" : ", one an answer",
             ", as the chat template writes them");
  }
  model_->engine->watch_capacity([this] { asio::post(io_, [this] { set_limits(); }); });
  set_limits();
  if (state_ == State::kLoading) state_ = State::kReady;
}

// Of what the engine can do now. With no instance there is nothing to be had a turn for; who waits, waits on for one
// that is started again, and else hears that there will be none.
void Gateway::set_limits() {
  if (model_ == nullptr) return;
  Admission::Limits limits;
  for (size_t i = 0; i < limits.waiting.size(); ++i) limits.waiting[i] = static_cast<size_t>(options_.queue_limit(i));
  limits.running = static_cast<size_t>(model_->engine->max_running());
  const int64_t tokens = options_.max_queue_tokens, held = model_->engine->kv_tokens();
  limits.tokens = static_cast<size_t>(tokens > 0 ? tokens : kQueueTokens * held);
  if (limits.running == 0) limits.tokens = admission_.limits().tokens;
  admission_.set_limits(limits);
  if (will_accept().ok()) return;
  for (Wakeup* wakeup : active_) wakeup->notify();
}

// Requests are still taken while the server is unhealthy: only one that succeeds can show that the trouble is over. A
// generation that its client left has the finish reason none and tells nothing.
void Gateway::generation_ended(const absl::StatusOr<GenerateResult>& result) {
  if (result.status().code() == absl::StatusCode::kInternal) {
    const bool first = failure_.empty();
    failure_ = one_line(std::string(result.status().message()));
    if (failure_.empty()) failure_ = "no reason was given";
    if (first) log_warning("the server is unhealthy until a generation succeeds: ", failure_);
  } else if (result.ok() && result->finish != FinishReason::kNone && !failure_.empty()) {
    failure_.clear();
    log_info("a generation succeeded: the server is healthy again");
  }
}

void Gateway::drain(std::function<void()> when_idle) {
  if (state_ == State::kLoading || state_ == State::kReady) state_ = State::kDraining;
  when_idle_ = std::move(when_idle);
  if (active_.empty()) when_idle_();
}

void Gateway::cut() {
  state_ = State::kCutting;
  stop_fetching_.request_stop();
  for (Wakeup* wakeup : active_) wakeup->notify();
}

Gateway::ActiveRequest::ActiveRequest(Gateway& gateway, Wakeup& wakeup)
    : gateway_(gateway), place_(gateway.active_.insert(gateway.active_.end(), &wakeup)) {}

Gateway::ActiveRequest::~ActiveRequest() {
  gateway_.active_.erase(place_);
  if (gateway_.active_.empty() && gateway_.when_idle_) gateway_.when_idle_();
}

}  // namespace parvl
