// What /metrics tells. Every figure of a pool stands there twice: as parvl_NAME with the label `pool`, and as vllm:NAME
// with vLLM's label and buckets, so that what was made for vLLM reads it too.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"
#include "parvl/exec/engine.h"
#include "parvl/serve/admission.h"

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
  Metrics(const std::string& pool, const std::string& model_name);
  ~Metrics();

  void first_token(double since_arrival_s, int64_t prompt_tokens);
  void later_token(double since_last_s);
  void ended(FinishReason reason, const StageSeconds& stages,
             double since_arrival_s);  // a generation; kNone: cancelled
  void refused(Refusal reason);
  void waiting(QueueKind kind, size_t count);  // in the gateway, of the coming text
  // The Prometheus text format. `stats` counts since the engine's start; `queued` wait outside of it.
  std::string text(const SchedulerStats& stats, int64_t queued);

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
  std::map<std::string, std::string> own_labels_, vllm_labels_;
  std::unique_ptr<prometheus::Registry> registry_;
  Twin<prometheus::Histogram> first_token_, inter_token_, e2e_, queue_, prefill_, decode_;
  std::array<prometheus::Histogram*, kStageNames.size()> stages_{};
  std::array<prometheus::Counter*, kRefusalNames.size()> refused_{};
  std::array<prometheus::Gauge*, kQueueNames.size()> queues_{};
  std::map<FinishReason, Twin<prometheus::Counter>> success_;
  Twin<prometheus::Counter> prompt_tokens_, generation_tokens_;
  Twin<prometheus::Gauge> running_, waiting_, kv_usage_;
  Twin<prometheus::Counter> preemptions_, prefix_queries_, prefix_hits_, mm_queries_, mm_hits_;
};

// Follows one request and tells the metrics. Both must outlive it. One thread.
class RequestTimer {
 public:
  // The request arrives now.
  RequestTimer(Metrics& metrics, const Clock& clock);
  void lap(Stage stage);  // what has passed since the arrival or the last lap belongs to this stage
  void token(size_t choice, int64_t prompt_tokens);
  void ended(const absl::StatusOr<GenerateResult>& result);  // one of its generations

 private:
  Metrics& metrics_;
  const Clock& clock_;
  const double arrival_;
  double last_lap_;
  StageSeconds stages_{};            // before the engine
  std::map<size_t, double> tokens_;  // when each choice's last one came
};

}  // namespace parvl
