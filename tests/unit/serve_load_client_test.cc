// The load client against a whole server in the same process.
#include <unistd.h>

#include "parvl/serve/load_client.h"
#include "tests/unit/serve_fixture.h"

namespace parvl {
namespace {

class LoadClientTest : public ServerTest {
 protected:
  LoadClientTest() {
    max_model_len_ = 100'000;
    options_.max_queue = 1000;
  }

  // `count` requests for two tokens each, all due at once.
  LoadTestOptions load(size_t count) {
    LoadTestOptions load;
    load.http.target = {"127.0.0.1", std::to_string(server_->port()), ""};
    load.requests = {{{{16, 8}}, 12, 2, ""}};
    load.due_s.assign(count, 0);
    return load;
  }

  static LoadReport report(const LoadResult& result, const Slo& slo = {}) {
    return make_report(result.records, result.itl_ms, slo);
  }
};

TEST_F(LoadClientTest, ClosedLoop) {
  start();
  LoadTestOptions options = load(1200);  // more than are made ahead
  options.concurrency = 20;
  const auto result = run_load(options, clock_);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->model, "tiny");
  EXPECT_NEAR(result->tokens_per_word, 6, 1);  // a token a byte
  const LoadReport figures = report(*result, {1e9, 1e9});
  EXPECT_EQ(figures.completed, 1200);
  EXPECT_EQ(figures.output_tokens, 2400);
  EXPECT_EQ(figures.itl_ms.count, 1200u);  // two texts a stream
  EXPECT_EQ(figures.violation_rate, 0);
  EXPECT_EQ(figures.lateness_ms.count, 0u);
  EXPECT_GT(figures.prompt_tokens, 1200 * 12);
}

TEST_F(LoadClientTest, OpenLoopSendsWhateverBecameOfTheOthers) {
  start();
  close_gate();
  LoadTestOptions options = load(100);
  options.requests[0].text_tokens = 0;  // so that nothing is asked before
  absl::StatusOr<LoadResult> result = absl::UnknownError("not run");
  std::thread client([&] { result = run_load(options, clock_); });
  EXPECT_TRUE(wait_admitted(100));  // while not one has an answer
  open_gate();
  client.join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(report(*result).completed, 100);
  EXPECT_EQ(report(*result).lateness_ms.count, 100u);
}

TEST(ServerFigures, BetweenTwoPages) {
  const MetricsPage before = parse_metrics(
      "# HELP parvl_busy_seconds_total x\n"
      "parvl_busy_seconds_total{module=\"llm_backbone\",pool=\"p\"} 10\n"
      "parvl_gateway_overhead_seconds_bucket{pool=\"p\",le=\"0.001\"} 100\n"
      "parvl_gateway_overhead_seconds_bucket{pool=\"p\",le=\"0.002\"} 100\n"
      "parvl_gateway_overhead_seconds_bucket{pool=\"p\",le=\"+Inf\"} 100\n");
  const MetricsPage after = parse_metrics(
      "parvl_busy_seconds_total{module=\"llm_backbone\",pool=\"p\"} 13\n"
      "parvl_busy_seconds_total{module=\"vision_encoder\",pool=\"p\"} 1\n"
      "parvl_gateway_overhead_seconds_bucket{pool=\"p\",le=\"0.001\"} 120\n"
      "parvl_gateway_overhead_seconds_bucket{pool=\"p\",le=\"0.002\"} 160\n"
      "parvl_gateway_overhead_seconds_bucket{pool=\"p\",le=\"+Inf\"} 180\n"
      "no sample\n");
  const ServerFigures figures = compare(before, after, 4);
  EXPECT_THAT(figures.busy,
              testing::ElementsAre(testing::Pair("p/llm_backbone", 0.75), testing::Pair("p/vision_encoder", 0.25)));
  EXPECT_DOUBLE_EQ(*figures.overhead_p50_ms, 1.5);  // the 40th of 80: the 20th of 40 in the second bucket
  EXPECT_DOUBLE_EQ(*figures.overhead_p99_ms, 2);    // beyond the last bound
  EXPECT_EQ(server_json(compare({}, {}, 4)), nullptr);
  EXPECT_EQ(server_line({}), "");
  EXPECT_FALSE(compare(after, after, 4).overhead_p50_ms.has_value());
}

TEST_F(LoadClientTest, StopsWhenTold) {
  start();
  close_gate();
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  LoadTestOptions options = load(50);
  options.requests[0].text_tokens = 0;
  options.concurrency = 10;
  options.stop_descriptor = ends[0];
  absl::StatusOr<LoadResult> result = absl::UnknownError("not run");
  std::thread client([&] { result = run_load(options, clock_); });
  EXPECT_TRUE(wait_admitted(10));
  ASSERT_EQ(::write(ends[1], "x", 1), 1);
  client.join();
  ::close(ends[0]);
  ::close(ends[1]);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(report(*result).sent, 10);
  EXPECT_EQ(report(*result).unfinished, 10);
  EXPECT_TRUE(wait_admitted(0));  // the server sees them leave
}

TEST_F(LoadClientTest, ErrorsBeforeAndWithinTheStream) {
  script_->error = absl::InternalError("out of pages");
  start();
  for (const auto& [tokens, reason] : {std::pair<int, std::string>(0, "HTTP 500"), {1, "error in the stream"}}) {
    {
      std::lock_guard lock(script_->mutex);
      script_->fail_after = tokens;
    }
    LoadTestOptions options = load(10);
    options.requests[0].text_tokens = 0;
    const auto result = run_load(options, clock_);
    ASSERT_TRUE(result.ok()) << result.status();
    const LoadReport figures = report(*result);
    EXPECT_EQ(figures.failed, 10);
    ASSERT_EQ(figures.failures.size(), 1u);
    EXPECT_EQ(figures.failures.begin()->first, reason);
    EXPECT_EQ(figures.output_tokens, 0);
  }
}

TEST_F(LoadClientTest, NothingIsSentToAServerThatDoesNotAnswer) {
  start();
  LoadTestOptions options = load(5);
  stop();
  const auto result = run_load(options, clock_);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(result.status().message()), testing::HasSubstr("does not answer: Connection refused"));
}

}  // namespace
}  // namespace parvl
