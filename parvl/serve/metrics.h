// What /metrics tells. parvl_NAME has the label `pool`: what modules do, the pool that holds them, summed over its
// instances; what concerns requests as a whole, the pool that they come to from the gateway. What vLLM has too stands
// there again as vllm:NAME of all pools together, with vLLM's label and buckets, so that what was made for it reads it.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"
#include "parvl/base/timeline.h"
#include "parvl/exec/engine.h"
#include "parvl/serve/admission.h"
#include "parvl/serve/fleet_view.h"
#include "parvl/serve/recent.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
class Registry;
}  // namespace prometheus

namespace parvl {

// The stages of a request, in their order; a model without images encodes nothing.
enum class Stage { kQueue, kPreprocess, kEncode, kPrefill, kDecode };
inline constexpr std::array<const char*, 5> kStageNames = {"queue", "preprocess", "encode", "prefill", "decode"};
using StageSeconds = std::array<double, kStageNames.size()>;

// Why a request was turned away, or given up.
enum class Refusal { kQueueFull, kTooManyTokens, kQueueTimeout, kRequestTimeout, kTooManyConnections };
inline constexpr std::array<const char*, 5> kRefusalNames = {"queue_full", "too_many_tokens", "queue_timeout",
                                                             "request_timeout", "too_many_connections"};

// One thread.
class Metrics {
 public:
  // One pool takes requests, or more; the first of them stands for the gateway.
  Metrics(std::vector<PoolInfo> pools, const std::string& model_name);
  ~Metrics();

  void first_token(double since_arrival_s, int64_t prompt_tokens);
  void later_token(double since_last_s);
  // One generation's times, in seconds.
  struct Times {
    StageSeconds stages{};
    double overlap = 0;     // of the stage encode, what passed during the stage prefill
    double first_work = 0;  // from the start of the first encoding or step for it to the first token
    double since_arrival = 0;
  };
  void ended(FinishReason reason, const Times& times);  // kNone: cancelled
  void gateway_overhead(double seconds);                // of a request that was answered
  void refused(Refusal reason);
  void responded(int http_status);             // 0: the client left before an answer
  void waiting(QueueKind kind, size_t count);  // in the gateway, of the coming text
  // The Prometheus text format. `stats` counts since the engine's start, and `by_pool` what each pool's part of it is
  // (none before the start); `queued` wait outside of it; `healthy`: every pool can serve.
  std::string text(const EngineStats& stats, const std::vector<EngineStats>& by_pool, int64_t queued,
                   bool healthy = true);

  // The last requests' times to the first token, and times a token after it.
  struct Recent {
    RecentValues ttft_s, tpot_s;
  };
  Recent& recent() { return recent_; }

 private:
  // The same metric under both names.
  template <typename Metric>
  struct Twin {
    Metric* own = nullptr;
    Metric* vllm = nullptr;
  };
  struct Name {
    std::string name, help;
    std::map<std::string, std::string> labels = {};
  };
  Twin<prometheus::Histogram> histogram(const Name& name, const std::vector<double>& buckets);
  Twin<prometheus::Counter> counter(const Name& name);
  Twin<prometheus::Gauge> gauge(const Name& name);
  prometheus::Counter& responses(int http_status);
  void pool_figures(const PoolInfo& pool, const EngineStats& stats);
  void sums_for_vllm(const EngineStats& stats);

  const std::vector<PoolInfo> pools_;
  Recent recent_;
  std::map<std::string, std::string> own_labels_, vllm_labels_;
  std::unique_ptr<prometheus::Registry> registry_;
  Twin<prometheus::Histogram> first_token_, inter_token_, e2e_, queue_, prefill_, decode_;
  std::array<prometheus::Histogram*, kStageNames.size()> stages_{};
  std::array<prometheus::Counter*, kRefusalNames.size()> refused_{};
  std::array<prometheus::Gauge*, kQueueNames.size()> queues_{};
  std::map<FinishReason, Twin<prometheus::Counter>> success_;
  prometheus::Gauge* healthy_ = nullptr;
  prometheus::Histogram *overlap_ = nullptr, *overhead_ = nullptr;
  Twin<prometheus::Counter> prompt_tokens_, generation_tokens_;
  Twin<prometheus::Gauge> running_, waiting_;
};

// Follows one request and tells the metrics and the timeline, which outlive it. Times are the clock's seconds. One
// thread.
//
// The gateway's overhead is what a request spends in this program without waiting for its turn, for its images to be
// ready, or for the engine: from its last byte here to the engine's queue, and from a token (the first one of a stream,
// else the last) to its bytes in the socket.
class RequestTimer {
 public:
  // `timeline` may be null.
  RequestTimer(Metrics& metrics, const Clock& clock, double arrival_s, Timeline* timeline = nullptr,
               TrackId track = {});
  void lap(Stage stage);                     // what has passed since the arrival or the last lap belongs to this stage
  void media(double begin_s, double end_s);  // within the stage that the next lap ends: getting images ready
  void submitted();                          // the engine has it
  void token(size_t choice, int64_t prompt_tokens, double at_s);
  void ended(const absl::StatusOr<GenerateResult>& result);  // one of its generations
  void answered(double token_s);  // the bytes of this token are in the socket; the first call counts

 private:
  Metrics& metrics_;
  const Clock& clock_;
  Timeline* timeline_;
  TrackId track_;
  double arrival_;
  double last_lap_;
  double media_s_ = 0;
  double overhead_s_ = 0;  // before the engine
  bool answered_ = false;
  StageSeconds stages_{};            // before the engine
  std::map<size_t, double> tokens_;  // when each choice's last one came
};

}  // namespace parvl
