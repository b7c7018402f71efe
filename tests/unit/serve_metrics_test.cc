// /metrics: the figures of one request, those of the engine, and the names that they stand under.
#include "parvl/serve/metrics.h"
#include "tests/unit/serve_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;
using testing::Not;

PoolInfo one_pool(const std::string& name) { return {.name = name, .modules = {"vision_encoder", "llm_backbone"}}; }

EngineStats some_stats() {
  EngineStats stats;
  stats.running = 3;
  stats.waiting = 4;
  stats.blocks = 200;
  stats.blocks_used = 50;
  stats.preemptions = 6;
  stats.prefix_queries = 100;
  stats.prefix_hits = 40;
  stats.encoder_queries = 9;
  stats.encoder_hits = 8;
  stats.backbone_busy_s = 2.5;
  stats.encoder_busy_s = 0.25;
  stats.work[static_cast<size_t>(WorkKind::kDecode)] = {.replayed = 30, .launched = 2};
  return stats;
}

TEST(Metrics, EveryFigureStandsUnderBothNames) {
  Metrics metrics({one_pool("colocated")}, "tiny \"1\"");
  metrics.ended(FinishReason::kStop, {});
  const std::string text = metrics.text(some_stats(), {some_stats()}, 2);
  const std::vector<std::pair<std::string, std::string>> figures = {{"num_requests_running", "3"},
                                                                    {"num_requests_waiting", "6"},
                                                                    {"kv_cache_usage_perc", "0.25"},
                                                                    {"num_preemptions_total", "6"},
                                                                    {"prefix_cache_queries_total", "100"},
                                                                    {"prefix_cache_hits_total", "40"},
                                                                    {"mm_cache_queries_total", "9"},
                                                                    {"mm_cache_hits_total", "8"},
                                                                    {"prompt_tokens_total", "0"},
                                                                    {"generation_tokens_total", "0"},
                                                                    {"e2e_request_latency_seconds_count", "1"},
                                                                    {"request_queue_time_seconds_count", "1"},
                                                                    {"request_prefill_time_seconds_count", "1"},
                                                                    {"request_decode_time_seconds_count", "1"},
                                                                    {"time_to_first_token_seconds_count", "0"},
                                                                    {"inter_token_latency_seconds_count", "0"}};
  for (const auto& [name, value] : figures) {
    EXPECT_THAT(text, HasSubstr("\nparvl_" + name + "{pool=\"colocated\"} " + value + "\n"));
    EXPECT_THAT(text, HasSubstr("\nvllm:" + name + "{model_name=\"tiny \\\"1\\\"\"} " + value + "\n"));
  }
  EXPECT_THAT(text, HasSubstr("# TYPE vllm:time_to_first_token_seconds histogram\n"));
}

TEST(Metrics, CountersFollowTheEngineAndNeverGoBack) {
  Metrics metrics({one_pool("p")}, "m");
  EngineStats stats = some_stats();
  metrics.text(stats, {stats}, 0);
  stats.preemptions = 7;
  stats.running = 0;
  for (int scrape = 0; scrape < 2; ++scrape) {
    const std::string text = metrics.text(stats, {stats}, 0);
    EXPECT_THAT(text, HasSubstr("parvl_num_preemptions_total{pool=\"p\"} 7\n"));
    EXPECT_THAT(text, HasSubstr("parvl_num_requests_running{pool=\"p\"} 0\n"));
    EXPECT_THAT(text, HasSubstr("parvl_prefix_cache_hits_total{pool=\"p\"} 40\n"));
    EXPECT_THAT(text, HasSubstr("parvl_busy_seconds_total{module=\"llm_backbone\",pool=\"p\"} 2.5\n"));
    EXPECT_THAT(text, HasSubstr("parvl_busy_seconds_total{module=\"vision_encoder\",pool=\"p\"} 0.25\n"));
    EXPECT_THAT(text, HasSubstr("parvl_work_total{graph=\"replayed\",pool=\"p\",work=\"decode\"} 30\n"));
    EXPECT_THAT(text, HasSubstr("parvl_work_total{graph=\"none\",pool=\"p\",work=\"decode\"} 2\n"));
    EXPECT_THAT(text, HasSubstr("parvl_work_total{graph=\"none\",pool=\"p\",work=\"encode\"} 0\n"));
  }
}

// Modules' figures stand with the pools that hold them, those of requests with the pool that takes them, and vLLM's
// with all of them together.
TEST(Metrics, FiguresStandWithTheirPool) {
  const PoolInfo encoders = {.name = "e", .modules = {"vision_encoder"}, .takes_requests = false};
  const PoolInfo prefill = {.name = "p", .modules = {"projector", "llm_backbone"}};
  const PoolInfo decode = {.name = "d", .modules = {"projector", "llm_backbone"}, .takes_requests = false};
  Metrics metrics({encoders, prefill, decode}, "m");
  const auto tell = [&](const EngineStats& all, const std::vector<EngineStats>& by_pool) {
    return metrics.text(all, by_pool, 1);
  };
  std::string text = tell({}, {});
  EXPECT_THAT(text, HasSubstr("parvl_busy_seconds_total{module=\"llm_backbone\",pool=\"d\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("parvl_work_total{graph=\"none\",pool=\"e\",work=\"encode\"} 0\n"));
  EngineStats all = some_stats(), e, p, d;
  e.encoder_busy_s = 0.25;
  e.work[static_cast<size_t>(WorkKind::kEncode)].launched = 7;
  p.backbone_busy_s = 2;
  p.blocks = 100, p.blocks_used = 10;
  p.prefix_hits = 40;
  p.encoder_queries = 9;
  d.backbone_busy_s = 0.5;
  d.blocks = 100, d.blocks_used = 40;
  d.kv_fetched = 3;
  text = tell(all, {e, p, d});
  for (const char* line :
       {"parvl_busy_seconds_total{module=\"vision_encoder\",pool=\"e\"} 0.25",
        "parvl_busy_seconds_total{module=\"llm_backbone\",pool=\"p\"} 2",
        "parvl_busy_seconds_total{module=\"llm_backbone\",pool=\"d\"} 0.5",
        "parvl_work_total{graph=\"none\",pool=\"e\",work=\"encode\"} 7", "parvl_mm_cache_queries_total{pool=\"p\"} 9",
        "parvl_kv_cache_usage_perc{pool=\"p\"} 0.1", "parvl_kv_cache_usage_perc{pool=\"d\"} 0.4",
        "parvl_prefix_cache_hits_total{pool=\"p\"} 40", "parvl_prefix_cache_hits_total{pool=\"d\"} 0",
        "parvl_kv_handovers_total{outcome=\"fetched\",pool=\"d\"} 3", "parvl_healthy{pool=\"p\"} 1",
        "parvl_num_requests_waiting{pool=\"p\"} 5", "vllm:kv_cache_usage_perc{model_name=\"m\"} 0.25",
        "vllm:mm_cache_queries_total{model_name=\"m\"} 9", "vllm:prefix_cache_hits_total{model_name=\"m\"} 40"}) {
    EXPECT_THAT(text, HasSubstr("\n" + std::string(line) + "\n"));
  }
  for (const char* absent :
       {"llm_backbone\",pool=\"e\"", "vision_encoder\",pool=\"p\"", "kv_cache_usage_perc{pool=\"e\"}",
        "num_requests_running{pool=\"d\"}", "mm_cache_queries_total{pool=\"e\"}"}) {
    EXPECT_THAT(text, Not(HasSubstr(absent)));
  }
  p.encoder_busy_s = 1;  // one of its instances has taken the encoder on
  EXPECT_THAT(tell(all, {e, p, d}), HasSubstr("parvl_busy_seconds_total{module=\"vision_encoder\",pool=\"p\"} 1\n"));
}

TEST(Metrics, ARequestsTimesGoToTheirStages) {
  ManualClock clock;
  Metrics metrics({one_pool("p")}, "m");
  RequestTimer timer(metrics, clock, 0);
  const auto pass = [&](double seconds) { clock.advance_ns(static_cast<int64_t>(seconds * 1e9)); };
  pass(0.25);
  timer.lap(Stage::kPreprocess);
  pass(1);
  timer.lap(Stage::kQueue);
  pass(0.25);
  timer.lap(Stage::kPreprocess);
  timer.media(1.25, 1.375);
  pass(0.125);
  timer.submitted();  // 0.5 s here without the line and the image
  pass(4.875);
  timer.token(0, 30, clock.now_seconds());  // of the first choice
  pass(0.5);
  timer.token(1, 30, clock.now_seconds());
  timer.answered(clock.now_seconds() - 0.25);
  pass(0.03);
  timer.token(0, 30, clock.now_seconds());
  timer.answered(0);
  GenerateResult result;
  result.token_ids = {1, 2, 3};
  result.finish = FinishReason::kLength;
  result.queue_ms = 2000;
  result.encode_ms = 700;
  result.prefill_ms = 2500;
  result.overlap_ms = 300;
  result.ttft_ms = 5000;
  result.tpot_ms = 40;
  timer.ended(result);
  result.finish = FinishReason::kNone;  // cancelled
  timer.ended(result);
  timer.ended(failed("device lost"));
  const std::string text = metrics.text({}, {}, 0);
  const std::vector<std::string> lines = {"vllm:time_to_first_token_seconds_count{model_name=\"m\"} 2",
                                          "vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"5\"} 0",
                                          "vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"7.5\"} 2",
                                          "vllm:inter_token_latency_seconds_count{model_name=\"m\"} 1",
                                          "vllm:inter_token_latency_seconds_bucket{model_name=\"m\",le=\"0.5\"} 0",
                                          "vllm:inter_token_latency_seconds_bucket{model_name=\"m\",le=\"0.75\"} 1",
                                          "vllm:request_success_total{finished_reason=\"length\",model_name=\"m\"} 1",
                                          "vllm:request_success_total{finished_reason=\"abort\",model_name=\"m\"} 1",
                                          "vllm:request_success_total{finished_reason=\"stop\",model_name=\"m\"} 0",
                                          "vllm:prompt_tokens_total{model_name=\"m\"} 60",
                                          "vllm:generation_tokens_total{model_name=\"m\"} 3",
                                          "vllm:e2e_request_latency_seconds_count{model_name=\"m\"} 1",
                                          "parvl_request_stage_seconds_sum{pool=\"p\",stage=\"queue\"} 3",
                                          "parvl_request_stage_seconds_sum{pool=\"p\",stage=\"preprocess\"} 0.5",
                                          "parvl_request_stage_seconds_sum{pool=\"p\",stage=\"encode\"} 0.7",
                                          "parvl_request_stage_seconds_sum{pool=\"p\",stage=\"prefill\"} 2.5",
                                          "vllm:request_prefill_time_seconds_sum{model_name=\"m\"} 3",
                                          "parvl_request_encode_overlap_seconds_sum{pool=\"p\"} 0.3",
                                          "parvl_gateway_overhead_seconds_count{pool=\"p\"} 1",
                                          "parvl_gateway_overhead_seconds_sum{pool=\"p\"} 0.75",
                                          "parvl_request_stage_seconds_sum{pool=\"p\",stage=\"decode\"} 0.08"};
  for (const std::string& line : lines) EXPECT_THAT(text, HasSubstr("\n" + line));
}

TEST_F(ServerTest, MetricsOverHttp) {
  options_.api_keys = {"key"};
  script_->stats.running = 5;
  start();
  const std::string key = "Authorization: Bearer key\r\n";
  EXPECT_EQ(get("/metrics").status, 401);
  Json body = user_says("hi");
  body["n"] = 2;
  EXPECT_EQ(chat(body, key).status, 200);
  EXPECT_EQ(chat(Json{{"messages", 5}}, key).status, 400);
  const TestReply reply = get("/metrics", key);
  EXPECT_EQ(reply.status, 200);
  EXPECT_THAT(reply.headers.at("content-type"), HasSubstr("text/plain; version=0.0.4"));
  EXPECT_THAT(reply.body, HasSubstr("vllm:request_success_total{finished_reason=\"stop\",model_name=\"tiny\"} 2\n"));
  EXPECT_THAT(reply.body, HasSubstr("vllm:generation_tokens_total{model_name=\"tiny\"} 8\n"));
  EXPECT_THAT(reply.body, HasSubstr("parvl_num_requests_running{pool=\"colocated\"} 5\n"));
  EXPECT_THAT(reply.body, HasSubstr("parvl_healthy{pool=\"colocated\"} 1\n"));
  EXPECT_THAT(reply.body, HasSubstr("parvl_http_responses_total{pool=\"colocated\",status=\"200\"} 1\n"));
  EXPECT_THAT(reply.body, HasSubstr("parvl_http_responses_total{pool=\"colocated\",status=\"400\"} 1\n"));
  EXPECT_THAT(reply.body, Not(HasSubstr("status=\"401\"")));  // of /metrics itself
  EXPECT_THAT(reply.body, HasSubstr("parvl_num_requests_waiting{pool=\"colocated\"} 0\n"));
  EXPECT_THAT(reply.body, Not(HasSubstr("nan")));
}

TEST_F(ServerTest, WhatTheGatewayHoldsIsWaiting) {
  start();
  close_gate();
  std::vector<std::unique_ptr<TestClient>> clients;
  for (size_t i = 0; i < 4; ++i) {
    clients.push_back(std::make_unique<TestClient>(server_->port()));
    clients.back()->send(chat_request(user_says("x")));
    ASSERT_TRUE(wait_admitted(i + 1));
  }
  // The first runs and the next is in the engine as well, as soon as it is prepared; two wait for their turn.
  const int64_t end = clock_.now_ns() + 20'000'000'000;
  std::string text;
  do {
    text = get("/metrics").body;
  } while (text.find("parvl_num_requests_waiting{pool=\"colocated\"} 2\n") == std::string::npos &&
           clock_.now_ns() < end);
  EXPECT_THAT(text, HasSubstr("parvl_num_requests_waiting{pool=\"colocated\"} 2\n"));
  open_gate();
  for (auto& client : clients) EXPECT_EQ(client->read_reply().status, 200);
  EXPECT_THAT(get("/metrics").body, HasSubstr("parvl_num_requests_waiting{pool=\"colocated\"} 0\n"));
}

TEST_F(ServerTest, MetricsAreThereWhileTheModelLoads) {
  std::promise<void> go;
  start_with([&, wait = go.get_future().share()]() -> absl::StatusOr<std::unique_ptr<Engine>> {
    wait.wait();
    return std::make_unique<FakeEngine>(script_, folder_.path(), 200);
  });
  TestReply reply = get("/metrics");
  EXPECT_EQ(reply.status, 200);
  EXPECT_THAT(reply.body, HasSubstr("parvl_healthy{pool=\"colocated\"} 0\n"));
  go.set_value();
  ready_.get_future().wait();
  reply = get("/metrics");
  EXPECT_EQ(reply.status, 200);
  EXPECT_THAT(reply.body, HasSubstr("parvl_healthy{pool=\"colocated\"} 1\n"));
}

}  // namespace
}  // namespace parvl
