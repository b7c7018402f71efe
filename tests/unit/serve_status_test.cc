// What the admin port tells: shares and latencies of late, the status as JSON and as a table, a fleet's metrics.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parvl/serve/bearer_keys.h"
#include "parvl/serve/dashboard.h"
#include "parvl/serve/fleet_status.h"
#include "parvl/serve/recent.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

TEST(RecentValues, AreThoseSinceATimeInOrder) {
  RecentValues values;
  EXPECT_THAT(values.since(0), IsEmpty());
  for (const auto& [at_s, value] : {std::pair(1.0, 5.0), {2.0, 3.0}, {2.5, 9.0}, {3.0, 1.0}}) values.add(at_s, value);
  EXPECT_THAT(values.since(2), ElementsAre(1, 3, 9));
  EXPECT_THAT(values.since(0), ElementsAre(1, 3, 5, 9));
  EXPECT_THAT(values.since(3.5), IsEmpty());
}

TEST(RecentValues, ForgetTheOldestOverTheirLimit) {
  RecentValues values;
  for (size_t i = 0; i < RecentValues::kMost + 3; ++i) values.add(static_cast<double>(i), static_cast<double>(i));
  EXPECT_EQ(values.since(0).size(), RecentValues::kMost);
  EXPECT_EQ(values.since(0).front(), 3);
}

TEST(Quantile, IsAValueThatWasThere) {
  EXPECT_EQ(quantile({7}, 0.5), 7);
  EXPECT_EQ(quantile({7}, 0.99), 7);
  EXPECT_EQ(quantile({1, 2, 3, 4}, 0.5), 2);
  EXPECT_EQ(quantile({1, 2, 3, 4}, 0.99), 4);
  EXPECT_EQ(quantile({1, 2, 3, 4}, 0), 1);
}

using Reading = BusyShare::Reading;

TEST(BusyShare, IsTheTimeComputingInTheWindow) {
  BusyShare busy(10);
  EXPECT_EQ(busy.of_pool(0), 0);
  busy.take(0, {{0, 1, 0, true, 100}});  // whatever was before the first look does not count
  EXPECT_EQ(busy.of_pool(0), 0);
  for (int second = 1; second <= 30; ++second) busy.take(second, {{0, 1, 0, true, 100 + 0.5 * second}});
  EXPECT_DOUBLE_EQ(busy.of_instance(0), 0.5);
  for (int second = 31; second <= 35; ++second) busy.take(second, {{0, 1, 0, true, 115}});
  EXPECT_DOUBLE_EQ(busy.of_pool(0), 0.25);
  for (int second = 36; second <= 40; ++second) busy.take(second, {{0, 1, 0, true, 115}});
  EXPECT_DOUBLE_EQ(busy.of_pool(0), 0);
}

TEST(BusyShare, AnInstanceThatDoesNotServeIsNoTimeOfItsPool) {
  BusyShare busy(10);
  for (int second = 0; second <= 10; ++second) {
    busy.take(second, {{0, 1, 0, true, 0.8 * second}, {1, 1, 0, second > 5, 0}, {2, 1, 1, false, 3.0 * second}});
  }
  EXPECT_DOUBLE_EQ(busy.of_instance(0), 0.8);
  EXPECT_DOUBLE_EQ(busy.of_instance(1), 0);
  EXPECT_DOUBLE_EQ(busy.of_pool(0), 8.0 / 15);
  EXPECT_EQ(busy.of_pool(1), 0);  // it loads
}

TEST(BusyShare, ANewEpochCountsFromZero) {
  BusyShare busy(10);
  busy.take(0, {{0, 1, 0, true, 50}});
  busy.take(1, {{0, 1, 0, true, 51}});
  busy.take(2, {{0, 2, 0, true, 0.5}});
  busy.take(3, {{0, 2, 0, true, 0.5}});
  EXPECT_DOUBLE_EQ(busy.of_instance(0), 0.5);
}

TEST(BusyShare, IsNeverMoreThanAll) {
  BusyShare busy(10);
  busy.take(0, {{0, 1, 0, true, 0}});
  busy.take(1, {{0, 1, 0, true, 1.7}});  // it encodes and generates at once
  EXPECT_EQ(busy.of_pool(0), 1);
}

TEST(BearerKeys, OnlyAWholeKeyFits) {
  const BearerKeys keys({"one", "two"});
  EXPECT_EQ(keys.find("Bearer two"), 1u);
  EXPECT_EQ(keys.find("bearer one"), 0u);
  for (const char* header : {"", "Bearer", "Bearer ", "Bearer on", "Bearer one ", "one", "Basic one"}) {
    EXPECT_FALSE(keys.find(header).has_value()) << header;
  }
  EXPECT_FALSE(BearerKeys({}).find("Bearer one").has_value());
}

class Status : public testing::Test {
 protected:
  Status() : status_{{}, {}, {}, busy_, {"1.2", "tiny", 3671, absl::OkStatus(), 3}, {10, {0.001, 0.002}, {}}} {
    status_.pools = {{"encoder-pool", "encode", "gpu-24gb", 2, {"vision_encoder", "projector"}, false},
                     {"llm-pool", "llm", "gpu-40gb", 8, {"llm_backbone"}, true}};
    InstanceInfo encoder = {.id = 0, .epoch = 1, .pids = {11}, .pool = 0, .device = "cpu"};
    encoder.state = InstanceState::kReady;
    InstanceInfo llm = {.id = 1, .epoch = 4, .pids = {21, 22}, .pool = 1, .devices = 2, .device = "cpu"};
    llm.state = InstanceState::kReady;
    llm.running = 7;
    llm.waiting = 2;
    InstanceInfo lost = {.id = 2, .epoch = 2, .pool = 1, .devices = 2};
    lost.state = InstanceState::kFailed;
    lost.failures = 3;
    lost.stale = 5;
    lost.reason = "its process was\nkilled";
    status_.instances = {encoder, llm, lost};
  }
  BusyShare busy_{10};
  FleetStatus status_;
};

TEST_F(Status, TellsOfModulesThatWereAdded) {
  EXPECT_THAT(status_table(status_json(status_)), Not(HasSubstr("llm-pool +")));
  status_.instances[1].added = {"vision_encoder", "projector"};
  const Json json = status_json(status_);
  EXPECT_EQ(json["instances"][1]["modules"], Json({"llm_backbone", "vision_encoder", "projector"}));
  EXPECT_EQ(json["instances"][2]["modules"], Json({"llm_backbone"}));
  EXPECT_EQ(json["pools"]["llm-pool"]["modules"], Json({"llm_backbone"}));
  EXPECT_THAT(status_table(json), HasSubstr("llm-pool + vision_encoder, projector"));
}

TEST_F(Status, CountsWhatWaitsOnce) {
  status_.pools.push_back({"other-llm", "llm", "gpu-40gb", 1, {"llm_backbone"}, true});
  status_.parked = {.encodings = 4, .generations = 5};
  const Json json = status_json(status_);
  EXPECT_EQ(json["pools"]["encoder-pool"]["queue"], 4);
  EXPECT_EQ(json["pools"]["llm-pool"]["queue"], 10);  // the line and what was moved, and the engines' own
  EXPECT_EQ(json["pools"]["other-llm"]["queue"], 0);
}

TEST_F(Status, HasTheContractsShape) {
  const Json json = status_json(status_);
  EXPECT_EQ(json["pools"]["encoder-pool"]["queue"], 0);
  EXPECT_EQ(json["pools"]["llm-pool"]["queue"], 5);  // the gateway's line and the engines' own
  EXPECT_EQ(json["pools"]["llm-pool"]["ready"], 1);
  EXPECT_EQ(json["instances"][1]["pids"], Json({21, 22}));
  EXPECT_EQ(json["instances"][1]["running"], 5);
  EXPECT_EQ(json["instances"][2]["pids"], Json::array());
  EXPECT_EQ(json["instances"][2]["state"], "failed");
  EXPECT_EQ(json["latency"]["ttft_ms"]["p99"], 2.0);
  EXPECT_EQ(json["latency"]["tpot_ms"], nullptr);
}

TEST_F(Status, AsATable) {
  status_.gateway.health = absl::UnavailableError("pool llm-pool has no instance");
  EXPECT_EQ(status_table(status_json(status_)),
            "parvl 1.2 serves tiny, up 1 h 1 min; not ready: pool llm-pool has no instance\n"
            "TTFT p50 1.0 ms, p99 2.0 ms; TPOT p50 -, p99 -  (requests in the last 10.0 s: 2)\n"
            "\n"
            "POOL          ROLE    DEVICES       BUSY  QUEUE  READY  MODULES\n"
            "encoder-pool  encode  2 x gpu-24gb  0 %   0      1      vision_encoder, projector\n"
            "llm-pool      llm     8 x gpu-40gb  0 %   5      1      llm_backbone\n"
            "\n"
            "INSTANCE  POOL          STATE   EPOCH  PIDS    DEVICE  BUSY  RUNNING  WAITING  FAILURES  LAST FAILURE\n"
            "0         encoder-pool  ready   1      11      cpu     0 %   0        0        0         -\n"
            "1         llm-pool      ready   4      21, 22  cpu     0 %   5        2        0         -\n"
            "2         llm-pool      failed  2      -       -       0 %   0        0        3         its process was "
            "killed\n");
}

TEST_F(Status, OfAnotherVersionIsStillATable) {
  for (const char* text : {"{}", R"({"pools": 3, "instances": [1, {"id": {"a": 1}}], "latency": [], "gateway": null})",
                           R"({"pools": {"p": null}, "instances": {}})"}) {
    EXPECT_THAT(status_table(Json::parse(text)), HasSubstr("INSTANCE")) << text;
  }
}

TEST_F(Status, AsMetrics) {
  status_.pools[0].name = "a \"b\"";
  const std::string text = fleet_metrics(status_.pools, status_.instances);
  EXPECT_THAT(text, HasSubstr("\nparvl_instances{pool=\"llm-pool\",state=\"failed\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("\nparvl_instances{pool=\"a \\\"b\\\"\",state=\"failed\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("\nparvl_instance_failures_total{pool=\"llm-pool\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("\nparvl_stale_messages_total 5\n"));
}

TEST(Dashboard, RunsOnlyWhatItBrings) {
  EXPECT_THAT(dashboard_policy(), HasSubstr("script-src 'sha256-"));
  EXPECT_THAT(dashboard_policy(), Not(HasSubstr("unsafe")));
  EXPECT_THAT(std::string(kDashboardPage), Not(HasSubstr("innerHTML")));
  EXPECT_TRUE(kDashboardPage.ends_with("</html>\n"));
}

}  // namespace
}  // namespace parvl
