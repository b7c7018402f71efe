// Reading traces: what a line may hold, and that a wrong one is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "parvl/sim/trace.h"

namespace parvl {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TEST(Trace, ReadsSizesAndMessages) {
  const auto trace = parse_trace(
      R"({"t": 1.5, "images": [[640, 480], [32, 16]], "audio_s": [], "video": [], "text_tokens": 7, "output_tokens": 9})"
      "\n\n"
      R"({"t": 0, "messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}], "output_tokens": 2})"
      "\r\n",
      "t.jsonl");
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->size(), 2u);
  const TraceRequest &first = (*trace)[0], &second = (*trace)[1];  // in the order of their times
  EXPECT_EQ(first.t_s, 0);
  EXPECT_EQ(first.messages, R"([{"content":[{"text":"é","type":"text"}],"role":"user"}])");
  EXPECT_EQ(first.output_tokens, 2);
  EXPECT_EQ(second.t_s, 1.5);
  ASSERT_EQ(second.images.size(), 2u);
  EXPECT_EQ(second.images[0].width, 640);
  EXPECT_EQ(second.images[1].height, 16);
  EXPECT_EQ(second.text_tokens, 7);
  EXPECT_EQ(second.output_tokens, 9);
  EXPECT_EQ(second.messages, "");
}

struct Refusal {
  const char* line;
  const char* because;
};

TEST(Trace, NamesTheLineAndTheReason) {
  const Refusal refusals[] = {
      {"{", "not valid JSON"},
      {"7", "must be an object, found 7"},
      {R"({"text_tokens": 1, "output_tokens": 1})", R"(has no "t")"},
      {R"({"t": -1, "text_tokens": 1, "output_tokens": 1})", R"("t" must be between 0 and)"},
      {R"({"t": 1e9, "text_tokens": 1, "output_tokens": 1})", R"("t" must be between 0 and)"},
      {R"({"t": "0", "text_tokens": 1, "output_tokens": 1})", "'t' must be a number, found string"},
      {R"({"t": 0, "text_tokens": 1})", "output tokens must be between 1 and 1000000, found 0"},
      {R"({"t": 0, "text_tokens": 1, "output_tokens": 0})", "output tokens must be between 1 and 1000000, found 0"},
      {R"({"t": 0, "text_tokens": -1, "output_tokens": 1})", "text tokens must be between 0 and 1000000, found -1"},
      {R"({"t": 0, "text_tokens": 2000000, "output_tokens": 1})", "text tokens must be between 0 and 1000000"},
      {R"({"t": 0, "output_tokens": 1})", "the request is empty"},
      {R"({"t": 0, "images": [[1, 2, 3]], "output_tokens": 1})", R"("images" must be a list of [width, height])"},
      {R"({"t": 0, "images": [[1, -2]], "output_tokens": 1})", "found -2"},
      {R"({"t": 0, "images": [[1, 1.5]], "output_tokens": 1})", "found 1.5"},
      {R"({"t": 0, "images": [[1, 0]], "output_tokens": 1})", "an image's height must be between 1 and 8192, found 0"},
      {R"({"t": 0, "images": [[9000, 1]], "output_tokens": 1})", "an image's width must be between 1 and 8192"},
      {R"({"t": 0, "images": 3, "output_tokens": 1})", R"("images" must be a list)"},
      {R"({"t": 0, "text_token": 1, "output_tokens": 1})", "unknown key 'text_token'; did you mean text_tokens?"},
      {R"({"t": 0, "messages": [], "output_tokens": 1})", R"("messages" must be a list of at least one message)"},
      {R"({"t": 0, "messages": [{"content": "x"}], "output_tokens": 1})", R"(a message has no "role")"},
      {R"({"t": 0, "messages": [{"role": "user", "content": "x"}], "text_tokens": 1, "output_tokens": 1})",
       R"(has both "messages" and "text_tokens")"},
      {R"({"t": 0, "messages": [{"role": "user", "content": [{"type": "image"}]}], "output_tokens": 1})",
       "the type 'image'; valid: text, image_url"},
  };
  const std::string good = R"({"t": 0, "text_tokens": 1, "output_tokens": 1})";
  for (const Refusal& refusal : refusals) {
    const auto trace = parse_trace(good + "\n" + refusal.line, "t.jsonl");
    ASSERT_FALSE(trace.ok()) << refusal.line;
    EXPECT_EQ(trace.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(trace.status().message()), StartsWith("t.jsonl line 2: "));
    EXPECT_THAT(std::string(trace.status().message()), HasSubstr(refusal.because));
  }
  EXPECT_THAT(std::string(parse_trace("\n \n", "t.jsonl").status().message()), HasSubstr("holds no request"));
}

TEST(Trace, AudioAndVideoAreNotAvailableYet) {
  for (const char* line :
       {R"({"t": 0, "audio_s": [1.5], "output_tokens": 1})", R"({"t": 0, "video": [[64, 64, 8]], "output_tokens": 1})",
        R"({"t": 0, "messages": [{"role": "user", "content": [{"type": "input_audio"}]}], "output_tokens": 1})",
        R"({"t": 0, "messages": [{"role": "user", "content": [{"type": "video_url"}]}], "output_tokens": 1})"}) {
    const auto trace = parse_trace(line, "t.jsonl");
    EXPECT_EQ(trace.status().code(), absl::StatusCode::kUnimplemented) << line;
    EXPECT_THAT(std::string(trace.status().message()), HasSubstr("in a trace is not available yet"));
  }
}

TEST(Trace, EveryLimitIsReached) {
  TraceLimits limits;
  limits.requests = 2;
  limits.images = 2;
  limits.line_bytes = 100;
  const std::string line = "{\"t\": 0, \"text_tokens\": 1, \"output_tokens\": 1}\n";
  EXPECT_TRUE(parse_trace(line + line, "t", limits).ok());
  EXPECT_THAT(std::string(parse_trace(line + line + line, "t", limits).status().message()),
              HasSubstr("t line 3: over the limit of 2 requests"));
  EXPECT_TRUE(parse_trace(R"({"t": 0, "images": [[1,1],[1,1]], "output_tokens": 1})", "t", limits).ok());
  EXPECT_THAT(
      std::string(
          parse_trace(R"({"t":0,"images":[[1,1],[1,1],[1,1]],"output_tokens":1})", "t", limits).status().message()),
      HasSubstr("at most 2 are allowed"));
  EXPECT_THAT(
      std::string(
          parse_trace(line.substr(0, 40) + std::string(60, ' ') + line.substr(40), "t", limits).status().message()),
      HasSubstr("over the limit of 100"));
  EXPECT_EQ(read_trace("/nowhere/t.jsonl").status().code(), absl::StatusCode::kNotFound);
}

TEST(Trace, Synthetic) {
  const auto request = parse_synthetic("images=2x448x224,text=64,output=8");
  ASSERT_TRUE(request.ok()) << request.status();
  ASSERT_EQ(request->images.size(), 2u);
  EXPECT_EQ(request->images[1].width, 448);
  EXPECT_EQ(request->images[1].height, 224);
  EXPECT_EQ(request->text_tokens, 64);
  EXPECT_EQ(request->output_tokens, 8);
  for (const Refusal& refusal : std::vector<Refusal>{{"", "'' is not known"},
                                                     {"text=64", "output tokens must be between 1"},
                                                     {"output=8", "the request is empty"},
                                                     {"text=many,output=8", "text='many' must be a number of tokens"},
                                                     {"text,output=8", "text='' must be a number of tokens"},
                                                     {"images=448x448,output=8", "must be like images=2x448x448"},
                                                     {"images=65x8x8,output=8", "at most 64 are allowed"},
                                                     {"images=-1x8x8,output=8", "number of images must be between 0"},
                                                     {"n=3,output=8", "'n=3' is not known; give images="}}) {
    EXPECT_THAT(std::string(parse_synthetic(refusal.line).status().message()), HasSubstr(refusal.because));
  }
  EXPECT_EQ(parse_synthetic("audio=3,output=1").status().code(), absl::StatusCode::kUnimplemented);
}

TEST(Trace, PoissonTimes) {
  const std::vector<double> times = poisson_times(20'000, 50, 7);
  EXPECT_TRUE(std::is_sorted(times.begin(), times.end()));
  EXPECT_EQ(times, poisson_times(20'000, 50, 7));
  EXPECT_NE(times, poisson_times(20'000, 50, 8));
  // Mean gap 1/50 within 5 standard errors; a share 1 - 1/e of exponential gaps is below the mean.
  EXPECT_NEAR(times.back() / (20'000 - 1), 0.02, 5 * 0.02 / std::sqrt(20'000));
  int below = 0;
  for (size_t i = 1; i < times.size(); ++i) below += times[i] - times[i - 1] < 0.02;
  EXPECT_NEAR(below / 20'000.0, 0.632, 0.02);
}

}  // namespace
}  // namespace parvl
