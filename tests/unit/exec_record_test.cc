// What an engine writes down beside its answers: the file of `--record`, and counts in a trace.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/exec/engine_trace.h"
#include "parvl/exec/record_file.h"
#include "tests/unit/temporary_folder.h"

namespace parvl {
namespace {

using testing::HasSubstr;

class RecordTest : public testing::Test {
 protected:
  // What is told on standard error while `steps` steps are recorded.
  static std::string told_by(const std::string& path, int64_t max_bytes, int steps) {
    testing::internal::CaptureStderr();
    auto write = record_to(path, max_bytes);
    EXPECT_TRUE(write.ok()) << write.status();
    RecordedScheduler scheduler(SchedulerConfig{}, *write);
    for (int i = 0; i < steps; ++i) scheduler.schedule(i);
    return testing::internal::GetCapturedStderr();
  }
  static size_t count(const std::string& text, const std::string& part) {
    size_t found = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  }

  TemporaryFolder folder_;
};

TEST_F(RecordTest, HoldsEveryEventUpToItsLimit) {
  const std::string path = folder_.path() + "/record";
  EXPECT_EQ(told_by(path, 1 << 20, 100), "");
  EXPECT_EQ(replay(*read_file(path))->events, 100);
  const std::string told = told_by(path, 4096, 100);
  EXPECT_EQ(count(told, "the record " + path + " ends here"), 1u) << told;
  EXPECT_THAT(told, HasSubstr("4096 bytes (--record-max-bytes)"));
  const std::string record = *read_file(path);
  EXPECT_LE(record.size(), 4096u);
  EXPECT_GT(record.size(), 3500u);
  const auto report = replay(record);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->differing_line, 0);
  EXPECT_TRUE(report->cut);
  EXPECT_LT(report->events, 100);
}

TEST_F(RecordTest, AFullDiskIsToldOnce) {
  const std::string told = told_by("/dev/full", 1 << 20, 10);
  EXPECT_EQ(count(told, "the record /dev/full ends here"), 1u) << told;
  EXPECT_THAT(told, HasSubstr("No space left"));
}

TEST_F(RecordTest, ANewTraceBeginsWithTheCounts) {
  ManualClock clock;
  const auto timeline = std::make_shared<Timeline>(Timeline::Options{folder_.path() + "/t.json"}, clock);
  EngineTrace trace(timeline);
  for (int i = 0; i < 2; ++i) {
    const auto path = timeline->start();
    ASSERT_TRUE(path.ok()) << path.status();
    trace.counts(1, 2, 0, 0.5);
    trace.counts(2, 2, 0, 0.5);  // nothing new
    ASSERT_TRUE(timeline->stop().ok());
    const std::string text = *read_file(*path);
    for (const char* name : {"running", "waiting", "kv_cache_usage"}) {
      EXPECT_EQ(count(text, absl::StrCat("\"", name, "\"")), 1u) << text;
    }
  }
}

}  // namespace
}  // namespace parvl
