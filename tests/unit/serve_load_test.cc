// The parts of the load client that need no network: streams, figures, contents, URLs.
#include <absl/strings/escaping.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "parvl/serve/chat_stream.h"
#include "parvl/serve/http_client.h"
#include "parvl/serve/load_content.h"
#include "parvl/serve/load_report.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Percentile, LinearBetweenValues) {
  const std::vector<double> one = {7}, two = {10, 20}, five = {1, 2, 4, 8, 16};
  EXPECT_EQ(percentile(one, 0), 7);
  EXPECT_EQ(percentile(one, 99), 7);
  EXPECT_EQ(percentile(two, 0), 10);
  EXPECT_EQ(percentile(two, 50), 15);
  EXPECT_DOUBLE_EQ(percentile(two, 95), 19.5);
  EXPECT_EQ(percentile(two, 100), 20);
  EXPECT_EQ(percentile(five, 50), 4);
  EXPECT_EQ(percentile(five, 75), 8);
  EXPECT_DOUBLE_EQ(percentile(five, 90), 12.8);
  std::vector<double> hundred(101);
  for (size_t i = 0; i < hundred.size(); ++i) hundred[i] = static_cast<double>(i);
  for (const double p : {0, 1, 50, 90, 95, 99, 100}) EXPECT_DOUBLE_EQ(percentile(hundred, p), p);
}

TEST(Percentile, SummarySortsAndCounts) {
  const Summary summary = summarize({30, 10, 20});
  EXPECT_EQ(summary.count, 3u);
  EXPECT_EQ(summary.mean, 20);
  EXPECT_EQ(summary.p50, 20);
  EXPECT_DOUBLE_EQ(summary.p99, 29.8);
  EXPECT_EQ(summarize({}).count, 0u);
}

TEST(ReservoirTest, KeepsAFairSample) {
  Reservoir all(10, 1), some(1000, 1);
  for (int i = 0; i < 10; ++i) all.add(i);
  EXPECT_THAT(all.values(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  for (int i = 0; i < 100'000; ++i) some.add(i);
  ASSERT_EQ(some.values().size(), 1000u);
  const Summary summary = summarize(some.values());
  EXPECT_NEAR(summary.mean, 50'000, 5 * 28'868 / std::sqrt(1000));  // five standard errors
  EXPECT_NEAR(summary.p90, 90'000, 5'000);
}

LoadRecord completed(double due_s, double sent_s, double first_s, double end_s, int64_t tokens) {
  LoadRecord record;
  record.due_s = due_s;
  record.sent_s = sent_s;
  record.first_text_s = first_s;
  record.end_s = end_s;
  record.prompt_tokens = 10;
  record.output_tokens = record.asked_tokens = tokens;
  return record;
}

LoadRecord broken(double sent_s, double end_s, const char* failure, const char* detail) {
  LoadRecord record = completed(sent_s, sent_s, 0, end_s, 5);
  record.failure = failure;
  record.detail = detail;
  return record;
}

TEST(Report, Arithmetic) {
  std::vector<LoadRecord> records = {
      completed(1.0, 1.0, 1.1, 2.1, 11),  // TTFT 100, TPOT 100, e2e 1100
      completed(2.0, 2.5, 2.8, 3.0, 3),   // TTFT 300, TPOT 100, e2e 500; sent 500 ms late
      completed(3.0, 3.0, 3.2, 3.2, 1),   // TTFT 200, no TPOT
      broken(3.0, 5.0, "timeout", "first"),  broken(3.0, 3.001, "HTTP 429", "full"),  // quick, but no good request
      broken(3.0, 4.0, "timeout", "second"),
  };
  records.emplace_back();  // never sent
  records.back().due_s = 4;
  records.back().failure = "too many open";
  records.push_back(completed(4.5, 4.5, 0, 5.0, 5));
  records.back().unfinished = true;
  Reservoir itl;
  itl.add(40);
  const LoadReport report = make_report(records, itl, {250, 0});
  EXPECT_EQ(report.sent, 7);
  EXPECT_EQ(report.completed, 3);
  EXPECT_EQ(report.failed, 4);
  EXPECT_EQ(report.unfinished, 1);
  ASSERT_EQ(report.failures.size(), 3u);
  EXPECT_EQ(report.failures.at("timeout").count, 2);
  EXPECT_EQ(report.failures.at("timeout").example, "first");
  EXPECT_EQ(report.failures.at("HTTP 429").count, 1);
  EXPECT_DOUBLE_EQ(report.duration_s, 4);
  EXPECT_EQ(report.prompt_tokens, 30);
  EXPECT_EQ(report.output_tokens, 15);
  EXPECT_DOUBLE_EQ(report.requests_per_s, 0.75);
  EXPECT_DOUBLE_EQ(report.output_tokens_per_s, 3.75);
  EXPECT_EQ(report.ttft_ms.count, 3u);
  EXPECT_NEAR(report.ttft_ms.mean, 200, 1e-9);
  EXPECT_EQ(report.tpot_ms.count, 2u);
  EXPECT_NEAR(report.tpot_ms.mean, 100, 1e-9);
  EXPECT_NEAR(report.e2e_ms.p50, 500, 1e-9);
  EXPECT_EQ(report.itl_ms.mean, 40);
  EXPECT_EQ(report.lateness_ms.count, 7u);
  EXPECT_NEAR(report.lateness_ms.mean, 500.0 / 7, 1e-9);
  EXPECT_DOUBLE_EQ(report.goodput_per_s, 0.5);  // the TTFT of 300 is over
  EXPECT_DOUBLE_EQ(report.violation_rate, 1 - 2.0 / 7);
}

TEST(Report, BothObjectivesMustBeMet) {
  const LoadRecord record = completed(0, 0, 0.2, 1.2, 11);  // TTFT 200, TPOT 100
  EXPECT_TRUE((Slo{200.1, 100.1}.met_by(record)));
  EXPECT_FALSE((Slo{199.9, 100.1}.met_by(record)));
  EXPECT_FALSE((Slo{200.1, 99.9}.met_by(record)));
  EXPECT_TRUE((Slo{0, 100.1}.met_by(record)));
  EXPECT_TRUE((Slo{0, 1}.met_by(completed(0, 0, 0.2, 0.2, 1))));
  EXPECT_FALSE((Slo{1000, 0}.met_by(broken(0, 0.001, "timeout", ""))));
}

TEST(Report, NothingCompleted) {
  const LoadReport report = make_report({broken(0, 1, "connect", "refused")}, Reservoir(), {100, 0});
  EXPECT_EQ(report.violation_rate, 1);
  const Json json = report_json(report);
  EXPECT_TRUE(json["ttft_ms"].is_null());
  EXPECT_EQ(json["requests"]["failures"][0]["reason"], "connect");
  EXPECT_THAT(report_table(report), HasSubstr("failed   1: connect (refused)"));
  EXPECT_EQ(report_json(make_report({}, Reservoir(), {}))["requests"]["sent"], 0);
}

TEST(Report, JsonAndTable) {
  const LoadReport report = make_report({completed(0, 0, 0.1, 1.1, 11)}, Reservoir(), {200, 50});
  const Json json = report_json(report);
  EXPECT_NEAR(json["ttft_ms"]["p99"].get<double>(), 100, 1e-9);
  EXPECT_EQ(json["tokens"]["output"], 11);
  EXPECT_EQ(json["violation_rate"], 1);
  EXPECT_EQ(json["slo"]["tpot_ms"], 50);
  EXPECT_THAT(report_table(report), HasSubstr("TTFT <= 200 ms, TPOT <= 50 ms: goodput 0.00 requests/s"));
  EXPECT_TRUE(report_json(make_report({}, Reservoir(), {}))["violation_rate"].is_null());
}

constexpr const char* kRole = R"(data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]})"
                              "\n\n";
std::string says(const std::string& text) {
  return "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"" + text + "\"}}],\"usage\":null}\n\n";
}
constexpr const char* kUsage = R"(data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3}})"
                               "\n\n";

TEST(ChatStreamTest, TimesOfTextAndUsage) {
  ChatStream stream;
  ASSERT_TRUE(stream.push(kRole, 1.0).ok());
  EXPECT_FALSE(stream.has_text());
  ASSERT_TRUE(stream.push(says("a"), 2.0).ok());
  ASSERT_TRUE(stream.push(": a comment\n\n" + says("b") + says("c"), 2.5).ok());
  ASSERT_TRUE(stream.push(kUsage, 3.0).ok());
  EXPECT_FALSE(stream.done());
  ASSERT_TRUE(stream.push("data: [DONE]\n\n", 3.5).ok());
  EXPECT_TRUE(stream.done());
  EXPECT_EQ(stream.first_text_s(), 2.0);
  EXPECT_EQ(stream.done_s(), 3.5);
  EXPECT_EQ(stream.prompt_tokens(), 12);
  EXPECT_EQ(stream.output_tokens(), 3);
  EXPECT_THAT(stream.gaps_ms(), ElementsAre(500, 0));
}

TEST(ChatStreamTest, BytesOneByOneAndLineEnds) {
  std::string text = std::string(kRole) + says("x") + kUsage + "data: [DONE]\n\n";
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 2) text.insert(at, "\r");
  ChatStream stream;
  for (const char byte : text) ASSERT_TRUE(stream.push(std::string_view(&byte, 1), 1).ok());
  EXPECT_TRUE(stream.done() && stream.has_usage() && stream.has_text());
}

TEST(ChatStreamTest, NoTextMeansTheEndIsTheFirst) {
  ChatStream stream;
  ASSERT_TRUE(stream.push(std::string(kRole) + kUsage, 1).ok());
  ASSERT_TRUE(stream.push("data: [DONE]\n\n", 4).ok());
  EXPECT_EQ(stream.first_text_s(), 4);
}

TEST(ChatStreamTest, Errors) {
  const auto error = [](const std::string& bytes) {
    ChatStream stream;
    return std::string(stream.push(bytes, 1).message());
  };
  EXPECT_EQ(error("event: error\ndata: {\"error\":{\"message\":\"no memory\\nleft\"}}\n\n"), "no memory left");
  EXPECT_EQ(error("data: {\"error\":{\"message\":\"late\"}}\n\n"), "late");
  EXPECT_EQ(error("data: {\"object\":\"error\",\"message\":\"odd\",\"error\":true}\n\n"), "odd");
  EXPECT_THAT(error("data: {\n\n"), HasSubstr("a chunk of the stream: not valid JSON"));
  EXPECT_THAT(error("data: 5\n\n"), HasSubstr("is no object but 5"));
  EXPECT_THAT(error("data: {\"usage\":{\"prompt_tokens\":\"x\"}}\n\n"), HasSubstr("'prompt_tokens' must be"));
  EXPECT_THAT(error("data: " + std::string(2 << 20, 'x')), HasSubstr("an event of more than"));
  std::string lines;
  for (int i = 0; i < 1100; ++i) lines += "data: " + std::string(1000, 'x') + "\n";
  EXPECT_THAT(error(lines), HasSubstr("an event of more than"));
  EXPECT_EQ(error_message("<html>\nBad Gateway"), "<html> Bad Gateway");
}

int64_t count_words(const std::string& text) { return std::count(text.begin(), text.end(), ' ') + 1; }

TEST(Content, TextsDifferAndUseAllWordsAlike) {
  EXPECT_EQ(load_text(1, 0, 0), "");
  EXPECT_EQ(count_words(load_text(1, 0, 77)), 77);
  EXPECT_EQ(load_text(1, 5, 77), load_text(1, 5, 77));
  std::set<std::string> texts;
  for (uint64_t i = 0; i < 1000; ++i) texts.insert(load_text(1, i, 16)), texts.insert(load_text(2, i, 16));
  EXPECT_EQ(texts.size(), 2000u);
  std::string text = load_text(1, 3, 2 * kLoadVocabulary);
  std::map<std::string, int> counts;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    ++counts[text.substr(at, end - at)];
    at = end + 1;
  }
  EXPECT_EQ(counts.size(), static_cast<size_t>(kLoadVocabulary));
  for (const auto& [word, count] : counts) EXPECT_EQ(count, 2) << word;
}

TEST(Content, ImagesHaveTheirSizeAndAreDistinct) {
  std::set<std::string> pixels;
  for (uint64_t number = 0; number < 3000; ++number) {
    const Image image = load_image(1, number, {3, 2});
    ASSERT_EQ(image.rgb.size(), 18u);
    pixels.emplace(image.rgb.begin(), image.rgb.end());
  }
  EXPECT_EQ(pixels.size(), 3000u);
  EXPECT_EQ(load_image(1, 7, {100, 40}).rgb, load_image(1, 7, {100, 40}).rgb);
  EXPECT_NE(load_image(1, 7, {100, 40}).rgb, load_image(2, 7, {100, 40}).rgb);
}

std::vector<std::string> image_urls(const std::string& body) {
  std::vector<std::string> urls;
  const Json json = Json::parse(body);
  for (const Json& part : json["messages"][0]["content"]) {
    if (part["type"] == "image_url") urls.push_back(part["image_url"]["url"]);
  }
  return urls;
}

TEST(Content, BodyIsAChatRequest) {
  LoadContent content({"tiny", 1, 0, 2.0});
  const Json body = Json::parse(content.body({{{40, 30}, {8, 8}}, 20, 6, ""}, 0));
  EXPECT_EQ(body["model"], "tiny");
  EXPECT_EQ(body["max_tokens"], 6);
  EXPECT_EQ(body["ignore_eos"], true);
  EXPECT_EQ(body["stream"], true);
  EXPECT_EQ(body["stream_options"]["include_usage"], true);
  const Json& parts = body["messages"][0]["content"];
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(count_words(parts[2]["text"]), 10);
  const std::string url = parts[0]["image_url"]["url"];
  std::string png;
  ASSERT_TRUE(absl::Base64Unescape(url.substr(url.find(',') + 1), &png));
  const auto image = decode_image(png);
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(image->width, 40);
  EXPECT_EQ(image->height, 30);

  const std::string messages = R"([{"role":"user","content":"hi"}])";
  const Json real = Json::parse(LoadContent({"", 1, 0, 1}).body({{}, 0, 3, messages}, 0));
  EXPECT_EQ(real["messages"], Json::parse(messages));
  EXPECT_FALSE(real.contains("model"));
}

TEST(Content, RepeatedImagesHaveTheirShare) {
  for (const double share : {0.0, 0.5, 1.0}) {
    LoadContent content({"", 1, share, 1}), again({"", 1, share, 1});
    std::set<std::string> distinct;
    const LoadRequest request{{{16, 16}, {16, 16}}, 0, 1, ""};
    for (uint64_t i = 0; i < 500; ++i) {
      const std::string body = content.body(request, i);
      EXPECT_EQ(body, again.body(request, i));
      for (std::string& url : image_urls(body)) distinct.insert(std::move(url));
    }
    const double expected = share == 1 ? 1 : 1000 * (1 - share);
    EXPECT_NEAR(static_cast<double>(distinct.size()), expected, share == 0.5 ? 80 : 0);  // five standard deviations
  }
}

TEST(Target, Urls) {
  const auto parts = [](const char* url) {
    const auto target = parse_target(url);
    return target.ok() ? target->host + " " + target->port + " " + target->path
                       : std::string(target.status().message());
  };
  EXPECT_EQ(parts("http://127.0.0.1:8000"), "127.0.0.1 8000 ");
  EXPECT_EQ(parts("http://localhost"), "localhost 80 ");
  EXPECT_EQ(parts("http://localhost:1/v1/"), "localhost 1 ");
  EXPECT_EQ(parts("http://localhost:1/some/path"), "localhost 1 /some/path");
  EXPECT_EQ(parts("http://[::1]:8000/"), "::1 8000 ");
  EXPECT_EQ(parts("http://[::1]"), "::1 80 ");
  for (const char* wrong :
       {"", "localhost:8000", "ftp://localhost", "http://", "http://:80", "http://localhost:", "http://localhost:x",
        "http://localhost:123456", "http://[::1", "http://localhost x", "http://localhost/?x", "http://localhost@x"}) {
    EXPECT_THAT(parts(wrong), HasSubstr("must be like http://127.0.0.1:8000")) << wrong;
  }
  EXPECT_EQ(parse_target("https://localhost").status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace parvl
