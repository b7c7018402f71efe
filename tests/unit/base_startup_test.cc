// What a start tells, on a clock that the test moves; and how much memory there is, from files that the test writes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <future>

#include "parvl/base/memory.h"
#include "parvl/base/startup.h"

namespace parvl {
namespace {

using testing::ElementsAre;

struct Told {
  ManualClock clock;
  std::vector<std::string> lines;
  Startup startup{clock, [this](const std::string& line) { lines.push_back(line); }};
  void pass(double seconds) { clock.advance_ns(static_cast<int64_t>(seconds * 1e9)); }
};

TEST(Startup, TellsPhasesWithTheirTimes) {
  Told told;
  told.startup.begin("files");
  told.pass(0.25);
  told.startup.begin("weights");
  told.pass(2);
  told.startup.progress(10'500'000'000, 10'500'000'000);
  told.startup.begin("KV memory");
  told.startup.finish();
  told.startup.finish();
  told.pass(100);
  told.startup.beat();
  EXPECT_THAT(told.lines, ElementsAre("ready after 2.3 s: files 0.3 s, weights 2 s at 5.25 GB/s, KV memory 0 s"));
}

// A big model, whose weights take 100 s: however its tensors come, nobody waits longer than five seconds for a line.
TEST(Startup, IsNeverSilentForFiveSeconds) {
  for (const double tensor_s : {0.01, 0.7, 3.9, 30.0}) {
    SCOPED_TRACE(tensor_s);
    Told told;
    told.startup.begin("weights");
    std::vector<double> times;
    double next_tensor = tensor_s;
    for (double now = 0; now < 100; now += 0.5) {
      told.pass(0.5);
      if (now >= next_tensor) {
        next_tensor += tensor_s;
        told.startup.progress(static_cast<int64_t>(now * (1 << 20)), 100 << 20);
      }
      told.startup.beat();
      if (told.lines.size() > times.size()) times.push_back(now + 0.5);
    }
    ASSERT_GE(times.size(), 19u);
    ASSERT_EQ(times.size(), told.lines.size());  // one at a time
    double last = 0;
    for (const double time : times) {
      EXPECT_LT(time - last, 5);
      EXPECT_GE(time - last, Startup::kSilence);
      last = time;
    }
    EXPECT_THAT(told.lines.back(),
                testing::MatchesRegex("starting: weights [0-9]+ of 100 MiB \\([0-9]+ %\\), [0-9.]+ s"));
  }
}

TEST(Startup, AHeartbeatTellsUntilItsOwnerEnds) {
  ManualClock clock;
  std::promise<std::string> told;
  const auto startup = std::make_shared<Startup>(clock, [&](const std::string& line) { told.set_value(line); });
  startup->begin("weights");
  clock.advance_ns(static_cast<int64_t>(Startup::kSilence * 1e9));
  {
    const Heartbeat heartbeat(startup);
    std::future<std::string> line = told.get_future();
    ASSERT_EQ(line.wait_for(std::chrono::seconds(20)), std::future_status::ready);
    EXPECT_EQ(line.get(), "starting: weights, 4 s");
  }
  EXPECT_EQ(startup.use_count(), 1);  // nobody is left who could beat
}

class MemoryFiles : public testing::Test {
 protected:
  MemoryFiles() : root_(testing::TempDir() + "/parvl_memory_files") { std::filesystem::remove_all(root_); }
  ~MemoryFiles() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  int64_t available() const { return available_bytes_under(root_); }
  std::string root_;
};

TEST_F(MemoryFiles, TheSmallestLimitCounts) {
  EXPECT_EQ(available(), 0);
  write("/proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:    8000 kB\n");
  EXPECT_EQ(available(), 8000 * 1024);
  write("/proc/self/cgroup", "0::/a/b\n");
  EXPECT_EQ(available(), 8000 * 1024);  // no such files
  write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  write("/sys/fs/cgroup/a/b/memory.current", "5000\n");
  EXPECT_EQ(available(), 8000 * 1024);
  write("/sys/fs/cgroup/a/memory.max", "1000000\n");  // the group above
  write("/sys/fs/cgroup/a/memory.current", "400000\n");
  EXPECT_EQ(available(), 600'000);
  write("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 100000\n");  // can be dropped
  EXPECT_EQ(available(), 700'000);
  write("/sys/fs/cgroup/a/b/memory.max", "3000\n");
  EXPECT_EQ(available(), 0);  // over its limit
}

TEST_F(MemoryFiles, TheOlderControlGroups) {
  write("/proc/meminfo", "MemAvailable:    8000 kB\n");
  write("/proc/self/cgroup", "3:cpu,cpuacct:/x\n2:memory:/x\n");
  write("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n");
  write("/sys/fs/cgroup/memory/x/memory.usage_in_bytes", "5000\n");
  EXPECT_EQ(available(), 8000 * 1024);
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n");
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1500000\n");
  write("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file 250000\n");
  EXPECT_EQ(available(), 750'000);
}

TEST(Memory, ThisMachineSaysSomething) { EXPECT_GT(available_bytes(), 0); }

}  // namespace
}  // namespace parvl
