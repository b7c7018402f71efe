// What a run writes while it works.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "parvl/train/trainer_output.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

// Its clock is an hour later at every look, so that every silence is a long one.
class FastClock : public Clock {
 public:
  int64_t now_ns() const override { return now_.fetch_add(int64_t{3600} * 1'000'000'000); }
  int64_t wall_ns() const override { return 0; }

 private:
  mutable std::atomic<int64_t> now_{0};
};

TEST(RunOutputTest, ALongOperationGivesASignOfLife) {
  FastClock clock;
  std::mutex mutex;
  std::condition_variable written;
  std::string text;
  int lines = 0;
  RunOutputOptions options;
  options.write = [&](std::string_view part) {
    const std::lock_guard<std::mutex> lock(mutex);
    text += part;
    ++lines;
    written.notify_all();
  };
  RunOutput output(clock, TrainRecipe(), options);
  output.working("loading the model");
  std::unique_lock<std::mutex> lock(mutex);
  written.wait(lock, [&] { return lines >= 3; });  // nothing is called; the thread speaks
  EXPECT_THAT(text, HasSubstr("loading the model ... "));
  lock.unlock();
  output.finish();
}

}  // namespace
}  // namespace parvl
