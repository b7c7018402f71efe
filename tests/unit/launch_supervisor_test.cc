// Ranks as real processes (shells): what they are given, and what happens when one dies.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "parvl/base/file.h"
#include "parvl/launch/supervisor.h"
#include "tests/unit/temporary_folder.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class SupervisorTest : public testing::Test {
 protected:
  // Each rank runs this in a shell, in the folder.
  LaunchOptions shell(const std::string& script, int64_t processes) {
    LaunchOptions out;
    out.command = {"sh", "-c", "cd '" + folder_.path() + "' && " + script};
    out.processes = processes;
    out.log = [this](const std::string& line) { log_.push_back(line); };
    return out;
  }
  std::string read(const std::string& name) {
    auto text = read_file(folder_.path() + "/" + name);
    return text.ok() ? *text : "(" + text.status().ToString() + ")";
  }

  TemporaryFolder folder_;
  std::vector<std::string> log_;
};

TEST_F(SupervisorTest, EveryRankKnowsItsPlace) {
  LaunchOptions options = shell(
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR "
      "$TORCHELASTIC_RESTART_COUNT > $LOCAL_RANK; echo $MASTER_PORT > port$LOCAL_RANK",
      2);
  options.nodes = 3;
  options.node = 1;
  options.master_host = "somewhere";
  options.master_port = 1234;
  ASSERT_TRUE(supervise(options).ok());
  EXPECT_EQ(read("0"), "2 0 6 2 1 somewhere 0\n");
  EXPECT_EQ(read("1"), "3 1 6 2 1 somewhere 0\n");
  EXPECT_EQ(read("port1"), "1234\n");
}

TEST_F(SupervisorTest, OneMachineGetsAFreePortForAll) {
  ASSERT_TRUE(supervise(shell("echo $MASTER_PORT > $RANK", 3)).ok());
  EXPECT_GT(std::stoi(read("0")), 1023);
  EXPECT_EQ(read("0"), read("1"));
  EXPECT_EQ(read("0"), read("2"));
}

// The other ranks would run for ever.
TEST_F(SupervisorTest, ARankThatDiesEndsTheOthers) {
  const absl::Status status = supervise(shell("if [ $RANK = 1 ]; then exit 7; fi; exec sleep 1000", 3));
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("rank 1 ended with exit code 7; the others were ended"));
  const absl::Status killed = supervise(shell("if [ $RANK = 0 ]; then kill -9 $$; fi; exec sleep 1000", 2));
  EXPECT_THAT(killed.message(), HasSubstr("rank 0 was ended by SIGKILL"));
}

TEST_F(SupervisorTest, ARankThatIgnoresTheSignalIsKilled) {
  LaunchOptions options = shell(
      "if [ $RANK = 1 ]; then while [ ! -e ready ]; do :; done; exit 3; fi; "
      "trap '' TERM; touch ready; while :; do sleep 1000; done",
      2);
  options.grace_s = 0.05;
  EXPECT_THAT(supervise(options).message(), HasSubstr("rank 1 ended with exit code 3"));
}

TEST_F(SupervisorTest, AllStartAgainAsOftenAsAllowed) {
  LaunchOptions options = shell("echo x >> attempts$RANK; [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 1", 2);
  options.max_restarts = 2;
  ASSERT_TRUE(supervise(options).ok());
  EXPECT_EQ(log_.size(), 2u);
  EXPECT_THAT(log_[1], HasSubstr("restart 2 of 2"));
  options.max_restarts = 1;
  EXPECT_THAT(supervise(options).message(), AllOf(HasSubstr("after 1 restart"), Not(HasSubstr("restarts"))));
}

// A configuration stays wrong however often it is tried.
TEST_F(SupervisorTest, ExitCode2IsNotTriedAgain) {
  LaunchOptions options = shell("echo x >> attempts$RANK; exit 2", 1);
  options.max_restarts = 5;
  EXPECT_EQ(supervise(options).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(read("attempts0"), "x\n");
}

TEST_F(SupervisorTest, AProgramThatIsNotThereIsAConfigurationError) {
  LaunchOptions options;
  options.command = {"/nowhere/parvl"};
  EXPECT_EQ(supervise(options).code(), absl::StatusCode::kInvalidArgument);
}

// One that has to be killed then has saved nothing, and the run has failed.
TEST_F(SupervisorTest, AStopThatARankDoesNotHeedIsAFailure) {
  const std::string fifo = folder_.path() + "/stop";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  LaunchOptions options = shell("trap '' TERM; echo > stop; while :; do sleep 1000; done", 1);
  options.stop_descriptor = ::open(fifo.c_str(), O_RDWR | O_CLOEXEC);
  options.grace_s = 0.05;
  EXPECT_THAT(supervise(options).message(), HasSubstr("rank 0 was ended by SIGKILL"));
  EXPECT_THAT(log_, ElementsAre(HasSubstr("rank 0 did not end within 0.05 s")));
  ::close(options.stop_descriptor);
}

// Asked to end, the ranks end by themselves, and that is no failure. Here it is a rank that asks, once all are there.
TEST_F(SupervisorTest, AStopReachesEveryRank) {
  const std::string fifo = folder_.path() + "/stop";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  LaunchOptions options = shell(
      "trap 'touch stopped$RANK; exit 0' TERM; touch started$RANK; "
      "if [ $RANK = 1 ]; then while [ ! -e started0 ]; do :; done; echo > stop; fi; "
      "while :; do sleep 0.01; done",
      2);
  options.stop_descriptor = ::open(fifo.c_str(), O_RDWR | O_CLOEXEC);
  EXPECT_TRUE(supervise(options).ok());
  EXPECT_TRUE(std::filesystem::exists(folder_.path() + "/stopped0"));
  EXPECT_TRUE(std::filesystem::exists(folder_.path() + "/stopped1"));
  ::close(options.stop_descriptor);
}

}  // namespace
}  // namespace parvl
