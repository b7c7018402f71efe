#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>

#include "apps/local_instances.h"
#include "tests/unit/temporary_folder.h"

namespace parvl {
namespace {

// In place of `parvl`: writes down what its process was given, and ends.
constexpr char kScript[] = R"(#!/bin/sh
echo "${CUDA_VISIBLE_DEVICES-unset} ${OMP_NUM_THREADS-unset}" > "$(dirname "$0")/$5.$7"
)";

class LocalInstancesTest : public testing::Test {
 protected:
  LocalInstancesTest() {
    unsetenv("CUDA_VISIBLE_DEVICES");
    unsetenv("OMP_NUM_THREADS");
    std::ofstream(program_) << kScript;
    std::filesystem::permissions(program_, std::filesystem::perms::owner_all);
  }
  // What the process of an instance's epoch was given, once it has ended.
  std::string given(int64_t instance, int64_t epoch) {
    std::unique_lock lock(mutex_);
    const auto over = [&] { return ended_.count({instance, epoch}) == 1; };
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), over));
    std::ifstream file(absl::StrCat(folder_.path(), "/", instance, ".", epoch));
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

  TemporaryFolder folder_;
  const std::string program_ = folder_.path() + "/program";
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::pair<int64_t, int64_t>> ended_;
};

TEST_F(LocalInstancesTest, EachSeesItsOwnGpusAlsoWhenItStartsAgain) {
  const auto instances =
      make_local_instances(program_, {{"llm-pool", {{"4", "5"}, {"6", "7"}}}, {"encoder-pool", {{"3"}}}}, {});
  instances->set_on_exit([this](InstanceId instance, int64_t epoch, const std::string&) {
    std::lock_guard lock(mutex_);
    ended_.insert({instance.value, epoch});
    changed_.notify_all();
  });
  const auto start = [&](int64_t instance, int64_t epoch, const std::string& pool) {
    instances->start({InstanceId{instance}, epoch, pool, "127.0.0.1:1", "token"});
  };
  start(1, 1, "encoder-pool");
  start(2, 1, "llm-pool");
  start(3, 1, "llm-pool");
  start(4, 1, "cpu-pool");
  EXPECT_EQ(given(1, 1), "3 unset\n");
  EXPECT_EQ(given(2, 1), "4,5 unset\n");
  EXPECT_EQ(given(3, 1), "6,7 unset\n");
  EXPECT_EQ(given(4, 1), "unset 1\n");
  start(2, 2, "llm-pool");
  EXPECT_EQ(given(2, 2), "4,5 unset\n");
}

}  // namespace
}  // namespace parvl
