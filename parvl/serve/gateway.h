// The state behind the routes: what is loaded, who waits, whether we are shutting down. One thread, the io_context's.
#pragma once

#include <list>
#include <memory>
#include <set>
#include <stop_token>
#include <string>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/rng.h"
#include "parvl/exec/engine.h"
#include "parvl/serve/admission.h"
#include "parvl/serve/async.h"
#include "parvl/serve/bearer_keys.h"
#include "parvl/serve/http_connection.h"
#include "parvl/serve/metrics.h"
#include "parvl/serve/openai_request.h"
#include "parvl/serve/options.h"
#include "parvl/serve/prepare_prompt.h"

namespace parvl {

// A model that answers, and what requests are checked against. Pool threads may use it.
struct LoadedModel {
  explicit LoadedModel(std::unique_ptr<Engine> engine, int64_t max_images);
  std::unique_ptr<Engine> engine;
  PromptLimits limits;
  RequestRules rules;
  const PromptBuilder& prompts() const { return engine->prompts(); }
};

class Gateway : public HttpHandler {
 public:
  enum class State { kLoading, kReady, kDraining, kCutting };

  Gateway(asio::io_context& io, const ServeOptions& options, const Clock& clock);
  ~Gateway() override;

  absl::Status check(const HttpConnection& connection) override;
  asio::awaitable<void> handle(HttpConnection& connection) override;
  std::string new_request_id() override { return "req-" + random_hex(); }
  std::string allowed_methods(std::string_view path) const override;
  void finished(const HttpConnection& connection, int http_status) override;

  void model_loaded(std::unique_ptr<LoadedModel> model);
  // How a generation ended. One that failed inside (not by its request) makes the server unhealthy until one succeeds.
  void generation_ended(const absl::StatusOr<GenerateResult>& result);
  // No new requests; `when_idle` is called once none is left, at once if there is none.
  void drain(std::function<void()> when_idle);
  void cut();  // what is still running ends with an error
  // Joins every thread behind the routes; requests that still wait hear nothing more. The io_context no longer runs.
  void stop();

  State state() const { return state_; }
  // accepts requests, all instances' pools serve, and the last generation did not fail
  absl::Status health() const;
  absl::Status will_accept() const;     // whether a request that waits for its turn may come to have one
  absl::Status accepts_images() const;  // whether there is, or soon will be, somewhere to encode them
  size_t active() const { return active_.size(); }

  // For serve_request.cc and tokenize.cc; what is const is for pool threads too.
  const ServeOptions& options() const { return options_; }
  LoadedModel& model() { return *model_; }
  const LoadedModel& model() const { return *model_; }
  // Stopped when the server cuts what runs.
  std::stop_token stop_token() const { return stop_fetching_.get_token(); }
  PromptMaker prompt_maker(std::stop_token stop) const {
    return {model_->prompts(), model_->limits, options_.media, std::move(stop)};
  }
  Admission& admission() { return admission_; }
  const Admission& admission() const { return admission_; }
  asio::thread_pool& pool() { return pool_; }
  // For what may fetch from the web and wait for it, so that it keeps nobody else waiting.
  asio::thread_pool& fetch_pool() { return fetch_pool_; }
  // For compiling grammars, so that one that takes long keeps only its like waiting.
  asio::thread_pool& grammar_pool() { return grammar_pool_; }
  asio::io_context& io() { return io_; }
  Metrics& metrics() { return metrics_; }
  const Clock& clock() const { return clock_; }
  std::string random_hex();
  uint64_t random_seed() { return rng_.next(); }
  absl::Status check_model(const std::string& name) const;
  void warn_unknown_fields(const std::vector<std::string>& fields);

  // While one lives, its request counts as active and hears of a cut.
  class ActiveRequest {
   public:
    ActiveRequest(Gateway& gateway, Wakeup& wakeup);
    ~ActiveRequest();
    ActiveRequest(const ActiveRequest&) = delete;
    ActiveRequest& operator=(const ActiveRequest&) = delete;

   private:
    Gateway& gateway_;
    std::list<Wakeup*>::iterator place_;
  };

 private:
  absl::Status check_key(const HttpConnection& connection) const;
  absl::Status check_method(const HttpConnection& connection) const;
  absl::Status accepts() const;  // requests: the model is loaded, has somewhere to run, and nobody shuts down
  void set_limits();
  Json model_card(const std::string& name) const;
  asio::awaitable<void> reply_health(HttpConnection& connection);
  asio::awaitable<void> reply_models(HttpConnection& connection);
  asio::awaitable<void> reply_metrics(HttpConnection& connection);
  asio::awaitable<void> reply_profile(HttpConnection& connection, bool start);

  asio::io_context& io_;
  const ServeOptions& options_;
  const Clock& clock_;
  Rng rng_;
  Admission admission_;
  Metrics metrics_;
  asio::thread_pool pool_, fetch_pool_, grammar_pool_;
  std::stop_source stop_fetching_;
  std::unique_ptr<LoadedModel> model_;
  int64_t created_;  // of the model, in seconds since 1970
  State state_ = State::kLoading;
  std::string failure_;  // why the last generation failed, or ""
  std::list<Wakeup*> active_;
  std::function<void()> when_idle_;
  const BearerKeys keys_;
  std::set<std::string> warned_fields_;
};

}  // namespace parvl
