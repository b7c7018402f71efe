#include "parvl/serve/metrics.h"

#include <absl/strings/str_cat.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <utility>

#include "parvl/base/check.h"

namespace parvl {
namespace {

using Labels = std::map<std::string, std::string>;

constexpr char kBackbone[] = "llm_backbone", kEncoder[] = "vision_encoder";

// vLLM's bounds, in seconds.
const std::vector<double> kFirstTokenBuckets = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,  0.25,  0.5,   0.75,
                                                1.0,   2.5,   5.0,  7.5,  10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0};
const std::vector<double> kTokenBuckets = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,  0.3,  0.4, 0.5,
                                           0.75, 1.0,   2.5,  5.0,   7.5, 10.0, 20.0, 40.0, 80.0};
const std::vector<double> kRequestBuckets = {0.3,  0.5,  0.8,  1.0,  1.5,   2.0,   2.5,   5.0,   10.0,   15.0,  20.0,
                                             30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0};

const std::vector<double> kOverheadBuckets = {0.00005, 0.0001, 0.00015, 0.0002, 0.00025, 0.0003, 0.0004,
                                              0.0005,  0.0006, 0.00075, 0.001,  0.002,   0.005,  0.01,
                                              0.025,   0.05,   0.1,     0.25,   0.5,     1.0,    2.5};

Labels joined(Labels labels, const Labels& more) {
  labels.insert(more.begin(), more.end());
  return labels;
}

// The metric's family in the registry: a new one, or the one that has this name.
template <typename Builder>
auto& family(Builder builder, const std::string& name, const std::string& help, prometheus::Registry& registry) {
  return builder.Name(name).Help(help).Register(registry);
}

template <typename Twin>
void observe(const Twin& twin, double seconds) {
  twin.own->Observe(seconds);
  twin.vllm->Observe(seconds);
}

template <typename Twin>
void add(const Twin& twin, int64_t count) {
  twin.own->Increment(static_cast<double>(count));
  twin.vllm->Increment(static_cast<double>(count));
}

// A counter that something else counts.
void raise_to(prometheus::Counter& counter, double value) { counter.Increment(value - counter.Value()); }

template <typename Twin>
void set(const Twin& twin, double value) {
  twin.own->Set(value);
  twin.vllm->Set(value);
}

double kv_usage(const EngineStats& stats) {
  return stats.blocks == 0 ? 0 : static_cast<double>(stats.blocks_used) / static_cast<double>(stats.blocks);
}

// What both kinds of names tell of the schedulers, which stand beside a backbone.
constexpr char kKvUsage[] = "kv_cache_usage_perc";
constexpr char kKvUsageHelp[] = "Share of the KV memory that is in use; 1 is all of it.";
struct Count {
  const char *name, *help;
  int64_t SchedulerStats::*value;
};
constexpr Count kCounts[] = {
    {"num_preemptions_total", "Generations that gave up their KV memory to others.", &SchedulerStats::preemptions},
    {"prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix cache.",
     &SchedulerStats::prefix_queries},
    {"prefix_cache_hits_total", "Prompt tokens that were found in the prefix cache.", &SchedulerStats::prefix_hits},
    {"mm_cache_queries_total", "Media items that were looked up in the encoder-output cache.",
     &SchedulerStats::encoder_queries},
    {"mm_cache_hits_total", "Media items that were found in the encoder-output cache.", &SchedulerStats::encoder_hits}};

bool holds(const PoolInfo& pool, std::string_view module) {
  return std::find(pool.modules.begin(), pool.modules.end(), module) != pool.modules.end();
}

std::string gateway_pool(const std::vector<PoolInfo>& pools) {
  const auto takes = std::find_if(pools.begin(), pools.end(), [](const PoolInfo& pool) { return pool.takes_requests; });
  PARVL_CHECK(takes != pools.end(), "no pool takes requests");
  return takes->name;
}

const char* reason_label(FinishReason reason) { return reason == FinishReason::kNone ? "abort" : to_string(reason); }

}  // namespace

Metrics::Metrics(std::vector<PoolInfo> pools, const std::string& model_name)
    : pools_(std::move(pools)),
      own_labels_{{"pool", gateway_pool(pools_)}},
      vllm_labels_{{"model_name", model_name}},
      registry_(std::make_unique<prometheus::Registry>()) {
  first_token_ =
      histogram({"time_to_first_token_seconds", "From a request's arrival to its first token."}, kFirstTokenBuckets);
  inter_token_ = histogram({"inter_token_latency_seconds", "From a token to the next one."}, kTokenBuckets);
  e2e_ = histogram({"e2e_request_latency_seconds", "From a request's arrival to its end."}, kRequestBuckets);
  queue_ = histogram({"request_queue_time_seconds", "Waiting, in the gateway and in the engine."}, kRequestBuckets);
  prefill_ = histogram({"request_prefill_time_seconds", "From the first encoding or step to the first token."},
                       kRequestBuckets);
  decode_ = histogram({"request_decode_time_seconds", "From the first token to the last."}, kRequestBuckets);
  for (size_t i = 0; i < stages_.size(); ++i) {
    auto& stages = family(prometheus::BuildHistogram(), "parvl_request_stage_seconds",
                          "Time that a request spent in each stage.", *registry_);
    stages_[i] = &stages.Add(joined(own_labels_, {{"stage", kStageNames[i]}}), kFirstTokenBuckets);
  }
  const auto own_histogram = [this](const std::string& name, const std::string& help, const auto& buckets) {
    return &family(prometheus::BuildHistogram(), name, help, *registry_).Add(own_labels_, buckets);
  };
  overlap_ = own_histogram("parvl_request_encode_overlap_seconds",
                           "Of the stage encode, what passed during the request's stage prefill.", kFirstTokenBuckets);
  overhead_ = own_histogram("parvl_gateway_overhead_seconds",
                            "What a request spends in the gateway without waiting for its turn, images or engine.",
                            kOverheadBuckets);
  responses(200);  // so that the name is there from the start
  healthy_ =
      &family(prometheus::BuildGauge(), "parvl_healthy", "1 when every pool can serve, as /health says.", *registry_)
           .Add(own_labels_);
  for (const FinishReason reason : {FinishReason::kStop, FinishReason::kLength, FinishReason::kNone}) {
    success_[reason] = counter(
        {"request_success_total", "Generations that ended, by reason.", {{"finished_reason", reason_label(reason)}}});
  }
  auto& refused = family(prometheus::BuildCounter(), "parvl_requests_refused_total",
                         "Requests that were turned away or given up, by reason.", *registry_);
  for (size_t i = 0; i < refused_.size(); ++i) {
    refused_[i] = &refused.Add(joined(own_labels_, {{"reason", kRefusalNames[i]}}));
  }
  auto& queues = family(prometheus::BuildGauge(), "parvl_queue_requests",
                        "Choices that wait in the gateway, by what their requests bring.", *registry_);
  for (size_t i = 0; i < queues_.size(); ++i) {
    queues_[i] = &queues.Add(joined(own_labels_, {{"queue", kQueueNames[i]}}));
  }
  prompt_tokens_ = counter({"prompt_tokens_total", "Tokens of prompts whose first token came."});
  generation_tokens_ = counter({"generation_tokens_total", "Tokens that were generated."});
  running_ = gauge({"num_requests_running", "Generations that the engine computes."});
  waiting_ = gauge({"num_requests_waiting", "Generations that wait, in the gateway and in the engine."});
}

Metrics::~Metrics() = default;

Metrics::Twin<prometheus::Histogram> Metrics::histogram(const Name& name, const std::vector<double>& buckets) {
  auto& own = family(prometheus::BuildHistogram(), "parvl_" + name.name, name.help, *registry_);
  auto& vllm = family(prometheus::BuildHistogram(), "vllm:" + name.name, name.help, *registry_);
  return {&own.Add(joined(own_labels_, name.labels), buckets), &vllm.Add(joined(vllm_labels_, name.labels), buckets)};
}

Metrics::Twin<prometheus::Counter> Metrics::counter(const Name& name) {
  auto& own = family(prometheus::BuildCounter(), "parvl_" + name.name, name.help, *registry_);
  auto& vllm = family(prometheus::BuildCounter(), "vllm:" + name.name, name.help, *registry_);
  return {&own.Add(joined(own_labels_, name.labels)), &vllm.Add(joined(vllm_labels_, name.labels))};
}

Metrics::Twin<prometheus::Gauge> Metrics::gauge(const Name& name) {
  auto& own = family(prometheus::BuildGauge(), "parvl_" + name.name, name.help, *registry_);
  auto& vllm = family(prometheus::BuildGauge(), "vllm:" + name.name, name.help, *registry_);
  return {&own.Add(joined(own_labels_, name.labels)), &vllm.Add(joined(vllm_labels_, name.labels))};
}

void Metrics::first_token(double since_arrival_s, int64_t prompt_tokens) {
  observe(first_token_, since_arrival_s);
  add(prompt_tokens_, prompt_tokens);
  add(generation_tokens_, 1);
}

void Metrics::later_token(double since_last_s) {
  observe(inter_token_, since_last_s);
  add(generation_tokens_, 1);
}

// A generation that was cancelled tells how it ended, not how long it takes to finish one.
void Metrics::ended(FinishReason reason, const Times& times) {
  add(success_.at(reason), 1);
  if (reason == FinishReason::kNone) return;
  observe(e2e_, times.since_arrival);
  observe(queue_, times.stages[static_cast<size_t>(Stage::kQueue)]);
  observe(prefill_, times.first_work);
  observe(decode_, times.stages[static_cast<size_t>(Stage::kDecode)]);
  for (size_t i = 0; i < stages_.size(); ++i) stages_[i]->Observe(times.stages[i]);
  overlap_->Observe(times.overlap);
}

void Metrics::refused(Refusal reason) { refused_[static_cast<size_t>(reason)]->Increment(); }

void Metrics::responded(int http_status) { responses(http_status).Increment(); }

// A counter of its own for each status that has come.
prometheus::Counter& Metrics::responses(int http_status) {
  auto& responses = family(prometheus::BuildCounter(), "parvl_http_responses_total",
                           "Answers to requests other than probes and /metrics, by HTTP status; left: the client had "
                           "gone before one.",
                           *registry_);
  const std::string status = http_status == 0 ? "left" : std::to_string(http_status);
  return responses.Add(joined(own_labels_, {{"status", status}}));
}

void Metrics::waiting(QueueKind kind, size_t count) { queues_[index_of(kind)]->Set(static_cast<double>(count)); }

void Metrics::gateway_overhead(double seconds) { overhead_->Observe(seconds); }

// Of a module that the pool does not hold nothing is told until there is something: an instance may take one on.
void Metrics::pool_figures(const PoolInfo& pool, const EngineStats& stats) {
  const auto labels = [&](const Labels& more) { return joined({{"pool", pool.name}}, more); };
  const auto count = [&](const std::string& name, const std::string& help, std::string_view module, double value,
                         const Labels& more = {}) {
    if (value == 0 && !holds(pool, module)) return;
    raise_to(family(prometheus::BuildCounter(), name, help, *registry_).Add(labels(more)), value);
  };
  const std::string busy = "parvl_busy_seconds_total";
  const std::string busy_help = "Time that a module has computed; its rate is the share of time that it is busy.";
  count(busy, busy_help, kBackbone, stats.backbone_busy_s, {{"module", kBackbone}});
  count(busy, busy_help, kEncoder, stats.encoder_busy_s, {{"module", kEncoder}});
  for (size_t i = 0; i < kWorkNames.size(); ++i) {
    const auto work = [&](const char* graph, int64_t value) {
      count("parvl_work_total", "Steps and encodings; graph=\"replayed\": by one launch of what was recorded.",
            static_cast<WorkKind>(i) == WorkKind::kEncode ? kEncoder : kBackbone, static_cast<double>(value),
            {{"work", kWorkNames[i]}, {"graph", graph}});
    };
    work("replayed", stats.work[i].replayed);
    work("none", stats.work[i].launched);
  }
  for (const Count& one : kCounts) {
    count(absl::StrCat("parvl_", one.name), one.help, kBackbone, static_cast<double>(stats.*one.value));
  }
  const auto handovers = [&](const char* outcome, int64_t value) {
    count("parvl_kv_handovers_total", "Answers begun elsewhere, by what became of their keys and values here.",
          kBackbone, static_cast<double>(value), {{"outcome", outcome}});
  };
  handovers("fetched", stats.kv_fetched);
  handovers("computed", stats.kv_fetch_failures);
  if (!holds(pool, kBackbone)) return;
  family(prometheus::BuildGauge(), absl::StrCat("parvl_", kKvUsage), kKvUsageHelp, *registry_)
      .Add(labels({}))
      .Set(kv_usage(stats));
}

void Metrics::sums_for_vllm(const EngineStats& stats) {
  for (const Count& one : kCounts) {
    raise_to(
        family(prometheus::BuildCounter(), absl::StrCat("vllm:", one.name), one.help, *registry_).Add(vllm_labels_),
        static_cast<double>(stats.*one.value));
  }
  family(prometheus::BuildGauge(), absl::StrCat("vllm:", kKvUsage), kKvUsageHelp, *registry_)
      .Add(vllm_labels_)
      .Set(kv_usage(stats));
}

std::string Metrics::text(const EngineStats& stats, const std::vector<EngineStats>& by_pool, int64_t queued,
                          bool healthy) {
  PARVL_CHECK(by_pool.empty() || by_pool.size() == pools_.size(), "figures of other pools");
  healthy_->Set(healthy ? 1 : 0);
  set(running_, static_cast<double>(stats.running));
  set(waiting_, static_cast<double>(stats.waiting + queued));
  for (size_t i = 0; i < pools_.size(); ++i) pool_figures(pools_[i], by_pool.empty() ? EngineStats{} : by_pool[i]);
  sums_for_vllm(stats);
  return prometheus::TextSerializer().Serialize(registry_->Collect());
}

RequestTimer::RequestTimer(Metrics& metrics, const Clock& clock, double arrival_s, Timeline* timeline, TrackId track)
    : metrics_(metrics), clock_(clock), timeline_(timeline), track_(track), arrival_(arrival_s), last_lap_(arrival_s) {}

void RequestTimer::lap(Stage stage) {
  const double now = clock_.now_seconds();
  const double since = std::exchange(last_lap_, now);
  stages_[static_cast<size_t>(stage)] += now - since;
  if (timeline_ != nullptr) timeline_->span(track_, kStageNames[static_cast<size_t>(stage)], since, now);
}

void RequestTimer::media(double begin_s, double end_s) {
  media_s_ += end_s - begin_s;
  if (timeline_ != nullptr && end_s > 0) timeline_->span(track_, "images", begin_s, end_s, {}, "images");
}

void RequestTimer::submitted() {
  overhead_s_ = clock_.now_seconds() - arrival_ - stages_[static_cast<size_t>(Stage::kQueue)] - media_s_;
}

void RequestTimer::token(size_t choice, int64_t prompt_tokens, double at_s) {
  const auto [place, first] = tokens_.try_emplace(choice, at_s);
  if (first) {
    metrics_.first_token(at_s - arrival_, prompt_tokens);
    metrics_.recent().ttft_s.add(at_s, at_s - arrival_);
  } else {
    metrics_.later_token(at_s - std::exchange(place->second, at_s));
  }
}

void RequestTimer::answered(double token_s) {
  if (std::exchange(answered_, true)) return;
  metrics_.gateway_overhead(overhead_s_ + clock_.now_seconds() - token_s);
}

// The engine's own waiting adds to the line's. What vLLM calls prefill begins with the first work, an encoding too.
void RequestTimer::ended(const absl::StatusOr<GenerateResult>& result) {
  if (!result.ok()) return;
  StageSeconds stages = stages_;
  const double later_tokens = static_cast<double>(std::max<size_t>(result->token_ids.size(), 1) - 1);
  if (later_tokens > 0) metrics_.recent().tpot_s.add(clock_.now_seconds(), result->tpot_ms * 1e-3);
  stages[static_cast<size_t>(Stage::kQueue)] += result->queue_ms * 1e-3;
  stages[static_cast<size_t>(Stage::kEncode)] = result->encode_ms * 1e-3;
  stages[static_cast<size_t>(Stage::kPrefill)] = result->prefill_ms * 1e-3;
  stages[static_cast<size_t>(Stage::kDecode)] = result->tpot_ms * later_tokens * 1e-3;
  metrics_.ended(result->finish, {stages, result->overlap_ms * 1e-3, (result->ttft_ms - result->queue_ms) * 1e-3,
                                  clock_.now_seconds() - arrival_});
}

}  // namespace parvl
