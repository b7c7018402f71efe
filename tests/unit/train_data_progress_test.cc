#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "parvl/train/progress.h"
#include "parvl/train/tensorboard.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int64_t kSecond = 1'000'000'000;

TEST(Duration, Units) {
  EXPECT_EQ(format_duration(0.4), "0s");
  EXPECT_EQ(format_duration(59.4), "59s");
  EXPECT_EQ(format_duration(200), "3m20s");
  EXPECT_EQ(format_duration(7505), "2h05m");
  EXPECT_EQ(format_duration(-1), "0s");
}

TEST(ProgressFormat, LineAndBar) {
  StepReport report{.step = 50,
                    .loss = 0.12345,
                    .grad_norm = 1.5,
                    .lr = 1e-3,
                    .tokens_per_second = 12'345,
                    .memory_bytes = 512 << 20};
  EXPECT_EQ(format_step(report, 100, 200),
            "step 50/100  loss 0.1235  grad_norm 1.5  lr 1.000e-03  tokens/s 12345  memory 512 MiB  eta 3m20s");
  report.mfu = 0.412;
  EXPECT_THAT(format_step(report, 100, -1), ::testing::EndsWith("memory 512 MiB  mfu 41.2%"));
  EXPECT_EQ(format_bar(report, 100, 200, 80),
            "[===============>              ] 50/100  loss 0.1235  12345 tok/s  eta 3m20s");
  for (int width = 0; width < 120; ++width)
    EXPECT_LE(format_bar(report, 100, 200, width).size(), static_cast<size_t>(width));
  report.step = 100;
  EXPECT_THAT(format_bar(report, 100, 0, 80), StartsWith("[==============================] 100/100"));
}

class ProgressTest : public ::testing::Test {
 protected:
  Progress make(bool terminal, int64_t total = 100, int64_t log_every = 10) {
    return Progress(clock_, {.total_steps = total, .log_every = log_every, .terminal = terminal},
                    [this](std::string_view text) { out_ += text; });
  }
  std::string take() { return std::exchange(out_, ""); }

  ManualClock clock_;
  std::string out_;
};

TEST_F(ProgressTest, ALineAnIntervalAndTheLastStep) {
  Progress progress = make(false, 25);
  for (int64_t step = 1; step <= 25; ++step) {
    clock_.advance_ns(kSecond / 10);
    progress.step({.step = step});
  }
  progress.finish();
  const std::string out = take();
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 3);
  EXPECT_THAT(out, HasSubstr("step 10/25"));
  EXPECT_THAT(out, HasSubstr("eta 2s\nstep 20/25"));  // 15 steps of 0.1 s
  EXPECT_THAT(out, HasSubstr("step 25/25"));
}

TEST_F(ProgressTest, NeverSilentForFiveSeconds) {
  Progress progress = make(false, 1000, 1000);
  double silent = 0, longest = 0;
  for (int64_t step = 1; step <= 100; ++step) {
    clock_.advance_ns(kSecond / 2);
    silent += 0.5;
    progress.step({.step = step});
    if (!take().empty()) silent = 0;
    longest = std::max(longest, silent);
  }
  EXPECT_LT(longest, 5);
  EXPECT_GT(longest, 3);
}

TEST_F(ProgressTest, LongLoadsAreReported) {
  Progress progress = make(false);
  progress.working("loading the model");
  EXPECT_EQ(take(), "");
  clock_.advance_ns(4 * kSecond);
  progress.working("loading the model");
  EXPECT_EQ(take(), "loading the model ... 4s\n");
  clock_.advance_ns(3 * kSecond);
  progress.working("loading the model");
  EXPECT_EQ(take(), "");
}

TEST_F(ProgressTest, TheBarMovesTenTimesASecondOnOneLine) {
  Progress progress = make(true, 1000);
  int drawn = 0;
  for (int64_t step = 1; step <= 1000; ++step) {
    clock_.advance_ns(kSecond / 100);
    progress.step({.step = step, .loss = 1});
    const std::string text = take();
    EXPECT_EQ(text.find('\n'), std::string::npos);
    if (!text.empty()) {
      ++drawn;
      EXPECT_EQ(text[0], '\r');
      EXPECT_LE(text.size(), 80u);
    }
  }
  EXPECT_GE(drawn, 95);
  EXPECT_LE(drawn, 105);
  progress.finish();
  progress.finish();
  EXPECT_EQ(take(), "\n");
}

TEST_F(ProgressTest, AShorterBarWipesTheOldOne) {
  Progress progress = make(true, 100);
  progress.step({.step = 1, .loss = 1234567.0});
  const size_t before = take().size();
  clock_.advance_ns(kSecond);
  progress.step({.step = 2, .loss = 1});
  EXPECT_GE(take().size(), before);
  progress.line("saved");
  const std::string line = take();
  EXPECT_THAT(line, StartsWith("\rsaved "));
  EXPECT_EQ(line.back(), '\n');
  EXPECT_GE(line.size(), before);
}

TEST(Crc32c, KnownValues) {
  // RFC 3720, appendix B.4.
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(""), 0u);
}

class EventFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::temp_directory_path() / ("parvl_events_" + std::to_string(::getpid()) + "_" +
                                                  ::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_;
};

TEST_F(EventFileTest, RecordsAreOnDiskWhole) {
  const auto writer = EventWriter::create((folder_ / "deep/er").string(), 1'700'000'000.5);
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_THAT((*writer)->path(), ::testing::EndsWith("events.out.tfevents.1700000000.parvl"));
  const auto size = [&] { return std::filesystem::file_size((*writer)->path()); };
  const auto first = size();
  EXPECT_GT(first, 16u);
  ASSERT_TRUE((*writer)->scalars(3, 1'700'000'001.0, {{"loss", 0.5}}).ok());
  // Frame (16) + Event: wall_time 9, step 2, summary 2 + Value 2 + (tag 6 + value 5).
  EXPECT_EQ(size() - first, 16u + 9 + 2 + 2 + 2 + 11);
}

TEST_F(EventFileTest, AnEarlierRunsFileStays) {
  const auto first = EventWriter::create(folder_.string(), 5);
  const auto second = EventWriter::create(folder_.string(), 5);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE((*first)->path(), (*second)->path());
}

TEST_F(EventFileTest, AFailedWriteIsAnErrorThatStays) {
  const auto writer = EventWriter::create(folder_.string(), 5);
  ASSERT_TRUE(writer.ok()) << writer.status();
  const auto size = std::filesystem::file_size((*writer)->path());
  // A limit on the file's size stands in for a full disk.
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = size + 10;
  ::setrlimit(RLIMIT_FSIZE, &small);
  const absl::Status full = (*writer)->scalars(1, 6, {{"loss", 1}});
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(exit_code(full), 1) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr((*writer)->path()));
  EXPECT_EQ((*writer)->scalars(2, 7, {{"loss", 1}}), full);
  EXPECT_EQ(std::filesystem::file_size((*writer)->path()), size + 10);
}

TEST_F(EventFileTest, AFolderThatCannotBeMade) {
  std::filesystem::create_directories(folder_);
  std::ofstream(folder_ / "plain") << "x";
  const auto writer = EventWriter::create((folder_ / "plain/sub").string(), 5);
  EXPECT_EQ(exit_code(writer.status()), 1);
  EXPECT_THAT(std::string(writer.status().message()), HasSubstr("cannot make the folder"));
}

}  // namespace
}  // namespace parvl
