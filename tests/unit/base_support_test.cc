// The small parts of base: text, log lines, clocks, signals, environment.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <tuple>

#include "parvl/base/clock.h"
#include "parvl/base/env.h"
#include "parvl/base/gpu_driver.h"
#include "parvl/base/log.h"
#include "parvl/base/signal.h"
#include "parvl/base/text.h"

namespace parvl {
namespace {

using ::testing::ElementsAre;

TEST(Text, EditDistance) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("abc", ""), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("flaw", "lawn"), 2);
}

TEST(Text, ClosestFirstKeepsTheOrderOfEquals) {
  EXPECT_THAT(closest_first("micro_bach", {"train", "eval", "micro_batch"}),
              ElementsAre("micro_batch", "train", "eval"));
  EXPECT_THAT(closest_first("zz", {"ab", "cd"}), ElementsAre("ab", "cd"));
}

TEST(Text, LikelyMeant) {
  EXPECT_EQ(likely_meant("genrate", {"serve", "generate"}), "generate");
  EXPECT_EQ(likely_meant("xyzzy", {"serve", "generate"}), "");
  EXPECT_EQ(likely_meant("x", {}), "");
}

TEST(Text, ExcerptIsPrintableAndBounded) {
  EXPECT_EQ(excerpt("plain"), "'plain'");
  EXPECT_EQ(excerpt("a\nb\xff"), "'a?b?'");
  EXPECT_EQ(excerpt("123456", 4), "'1234...'");
}

TEST(Text, OneLine) { EXPECT_EQ(one_line("  a\n\n b\tc \r\n"), "a b c"); }

TEST(Text, PercentDecode) {
  EXPECT_EQ(percent_decode("plain"), "plain");
  EXPECT_EQ(percent_decode("org%2Fname%3a%41"), "org/name:A");
  EXPECT_EQ(percent_decode("%25%32%35"), "%25");  // once, not again
  EXPECT_EQ(percent_decode("100%"), "100%");
  EXPECT_EQ(percent_decode("%4%zz%"), "%4%zz%");
  EXPECT_EQ(percent_decode("a%00b"), std::string("a\0b", 3));
}

TEST(Log, OneLineWithItsLevel) {
  EXPECT_EQ(format_log_line(LogLevel::kWarning, "two\nlines"), "warning: two lines");
  EXPECT_EQ(format_log_line(LogLevel::kInfo, "plain"), "plain");
  const LogFields fields = {{"id", "a\nb"}, {"status", 200}, {"seconds", 0.5}};
  EXPECT_EQ(format_log_line(LogLevel::kError, "text", fields), "error: text id=a b status=200 seconds=0.5");
  EXPECT_EQ(format_json_log_line(1'000'000'000'007'999'999, LogLevel::kError, "a \"b\"\nc \xff", fields),
            "{\"time\":\"2001-09-09T01:46:40.007Z\",\"level\":\"error\",\"message\":\"a \\\"b\\\" c \xef\xbf\xbd\","
            "\"id\":\"a\\nb\",\"status\":200,\"seconds\":0.5}");
}

TEST(Log, LevelDropsWhatIsBelow) {
  ::testing::internal::CaptureStderr();
  set_log_level(LogLevel::kWarning);
  log_info("hidden");
  log_warning("shown ", 1);
  set_log_level(LogLevel::kInfo);
  log_debug("hidden");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "warning: shown 1\n");
}

TEST(Clock, ManualMovesOnlyWhenTold) {
  ManualClock clock(5, 1'000);
  EXPECT_EQ(clock.now_ns(), 5);
  clock.advance_ns(10);
  EXPECT_EQ(clock.now_ns(), 15);
  EXPECT_EQ(clock.wall_ns(), 1'010);
}

TEST(Clock, RealNeverGoesBackAndKnowsTheYear) {
  const RealClock clock;
  const int64_t first = clock.now_ns();
  EXPECT_GE(clock.now_ns(), first);
  EXPECT_GT(clock.wall_seconds(), 1.7e9);
}

TEST(Env, ValueOrFallback) {
  ::setenv("PARVL_TEST_VARIABLE", "value", 1);
  EXPECT_EQ(get_env("PARVL_TEST_VARIABLE", "other"), "value");
  ::unsetenv("PARVL_TEST_VARIABLE");
  EXPECT_EQ(get_env("PARVL_TEST_VARIABLE", "other"), "other");
}

TEST(StopSignal, FirstSignalSetsTheFlagAndTheDescriptor) {
  const StopSignal stop;
  pollfd waiting = {stop.descriptor(), POLLIN, 0};
  EXPECT_FALSE(stop.requested());
  EXPECT_EQ(::poll(&waiting, 1, 0), 0);
  ::raise(SIGTERM);
  EXPECT_TRUE(stop.requested());
  EXPECT_EQ(stop.signal(), SIGTERM);
  EXPECT_EQ(::poll(&waiting, 1, 0), 1);
}

TEST(StopSignal, FormerHandlersComeBack) {
  struct sigaction before = {}, after = {};
  ::sigaction(SIGINT, nullptr, &before);
  { const StopSignal stop; }
  ::sigaction(SIGINT, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

TEST(StopSignalDeathTest, SecondSignalEndsTheProcess) {
  EXPECT_EXIT(
      {
        const StopSignal stop;
        ::raise(SIGINT);
        ::raise(SIGINT);
      },
      ::testing::ExitedWithCode(128 + SIGINT), "");
}

TEST(StopSignalDeathTest, OnlyOneAtATime) {
  EXPECT_DEATH(
      {
        const StopSignal first;
        const StopSignal second;
      },
      "second StopSignal");
}

TEST(GpuNames, AreThoseThatTheProcessIsShown) {
  using Names = std::vector<std::string>;
  const auto names = [](const char* visible, int64_t count) {
    setenv("CUDA_VISIBLE_DEVICES", visible, 1);
    return gpu_names(count);
  };
  EXPECT_EQ(names("", 3), (Names{"0", "1", "2"}));
  EXPECT_EQ(names("5,2", 2), (Names{"5", "2"}));
  EXPECT_EQ(names("GPU-a,GPU-b,GPU-wrong", 2), (Names{"GPU-a", "GPU-b"}));
  EXPECT_EQ(names("", 0), Names{});
  unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST(GpuNumber, IsThatOfTheMachine) {
  for (const auto& [visible, index, number] :
       {std::tuple("", 1, 1), {"6,2", 0, 6}, {"6,2", 1, 2}, {"6,2", 2, 2}, {"GPU-5a,GPU-6b", 1, 1}, {"-1", 0, 0}}) {
    setenv("CUDA_VISIBLE_DEVICES", visible, 1);
    EXPECT_EQ(gpu_number(index), number) << visible;
  }
  unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(gpu_number(3), 3);
}

}  // namespace
}  // namespace parvl
