#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <fstream>
#include <map>
#include <mutex>

#include "parvl/launch/children.h"
#include "tests/unit/temporary_folder.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

class ChildrenTest : public testing::Test {
 protected:
  // Half a sentence, once that child has ended.
  std::string ended(Children::Key key) {
    std::unique_lock lock(mutex_);
    const bool came = changed_.wait_for(lock, std::chrono::seconds(20), [&] { return ends_.contains(key); });
    EXPECT_TRUE(came);
    return came ? ends_.at(key) : "";
  }
  Children::OnExit listener() {
    return [this](Children::Key key, const std::string& how) {
      std::lock_guard lock(mutex_);
      EXPECT_TRUE(ends_.emplace(key, how).second) << "told twice of " << key;
      changed_.notify_all();
    };
  }
  // The number that a child writes into this file, once it has.
  pid_t pid_in(const std::string& file) {
    pid_t pid = 0;
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
         pid == 0 && std::chrono::steady_clock::now() < end;) {
      std::ifstream(file) >> pid;
    }
    return pid;
  }

  TemporaryFolder folder_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Children::Key, std::string> ends_;
};

TEST_F(ChildrenTest, TellOnceHowEachEnded) {
  Children children(listener());
  children.start(1, {{"sh", "-c", "exit 3"}});
  children.start(2, {{"sh", "-c", "kill -9 $$"}});
  children.start(3, {{"/no/such/program"}});
  children.start(4, {{"sh", "-c", "test \"$NAME\" = value && test -n \"$PATH\""}, {{"NAME", "value"}}});
  EXPECT_EQ(ended(1), "ended with exit code 3");
  EXPECT_EQ(ended(2), "was ended by SIGKILL");
  EXPECT_EQ(ended(3), "ended with exit code 2");
  EXPECT_EQ(ended(4), "ended with exit code 0");
  EXPECT_EQ(how_it_ended(SIGTERM), "was ended by SIGTERM");
  EXPECT_EQ(how_it_ended(SIGRTMIN), absl::StrCat("was ended by signal ", SIGRTMIN));
}

TEST_F(ChildrenTest, InheritNoDescriptorButTheThreeOfEverybody) {
  const int open = ::dup(STDERR_FILENO);  // as a listener that somebody opened without close-on-exec
  ASSERT_GT(open, 2);
  Children children(listener());
  children.start(1, {{"sh", "-c", "test ! -e /proc/$$/fd/" + std::to_string(open) + " && test -e /proc/$$/fd/2"}});
  EXPECT_EQ(ended(1), "ended with exit code 0");
  ::close(open);
}

TEST_F(ChildrenTest, KillEndsOneWithWhatItHasStarted) {
  const std::string file = folder_.path() + "/pid";
  Children children(listener());
  children.start(1,
                 {{"sh", "-c", "sleep 1000 & echo $! > " + file + ".part; mv " + file + ".part " + file + "; wait"}});
  children.start(2, {{"sleep", "1000"}});
  const pid_t grandchild = pid_in(file);
  ASSERT_GT(grandchild, 0);
  children.kill(1);
  EXPECT_EQ(ended(1), "was ended by SIGKILL");
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
       ::kill(grandchild, 0) == 0 && std::chrono::steady_clock::now() < end;) {
    // It may be a zombie until whoever inherits it has looked.
    std::string stat;
    std::getline(std::ifstream("/proc/" + std::to_string(grandchild) + "/stat"), stat);
    if (stat.find(") Z ") != std::string::npos) break;
  }
  children.kill(1);   // it has ended: no effect
  children.kill(99);  // nobody ever was
  std::lock_guard lock(mutex_);
  EXPECT_FALSE(ends_.contains(2));
}

TEST_F(ChildrenTest, AllEndWithTheirOwner) {
  const std::string file = folder_.path() + "/pid";
  pid_t pid = 0;
  {
    Children children(listener());
    children.start(1,
                   {{"sh", "-c", "echo $$ > " + file + ".part; mv " + file + ".part " + file + "; exec sleep 1000"}});
    pid = pid_in(file);
    ASSERT_GT(pid, 0);
  }
  EXPECT_NE(::kill(pid, 0), 0) << "it was waited for";
  std::lock_guard lock(mutex_);
  EXPECT_TRUE(ends_.empty()) << "nobody listens any more";
}

}  // namespace
}  // namespace parvl
