// Memory that the first of several processes fills and all map: filled once however many come at once, never taken for
// whole when it is not, and not to be written afterwards.
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>

#include "parvl/base/shared_block.h"

namespace parvl {
namespace {

using testing::HasSubstr;

constexpr int64_t kBytes = 3'000'001;

absl::Status fill(absl::Span<std::byte> memory) {
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i * 31 >> 3);
  return absl::OkStatus();
}
bool is_whole(const SharedContent& content) {
  std::vector<std::byte> want(static_cast<size_t>(kBytes));
  EXPECT_TRUE(fill(absl::MakeSpan(want)).ok());
  return content.bytes() == kBytes && std::memcmp(content.data(), want.data(), want.size()) == 0;
}

// What a process gives that runs `body`: its exit code, or minus the signal that ended it.
template <typename Body>
pid_t run_apart(Body body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  return child;
}
int end_of(pid_t child) {
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

class SharedBlockTest : public testing::Test {
 protected:
  absl::StatusOr<std::shared_ptr<const SharedContent>> open(const SharedContent::Fill& by = fill,
                                                            const std::string& identity = "weights",
                                                            int64_t bytes = kBytes) const {
    return SharedContent::open(block_->path(), bytes, identity, by);
  }
  std::unique_ptr<SharedBlock> block_ = *SharedBlock::create("parvl-test");
};

TEST_F(SharedBlockTest, ProcessesThatComeAtOnceFillItOnce) {
  auto* const fills = static_cast<std::atomic<int>*>(
      ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> children;
  EXPECT_EQ(shared_bytes({block_->path()}), 0);
  for (int i = 0; i < 6; ++i) {
    children.push_back(run_apart([&] {
      const auto content = open([&](absl::Span<std::byte> memory) {
        fills->fetch_add(1);
        return fill(memory);
      });
      return content.ok() && is_whole(**content) ? ((*content)->filled_here() ? 1 : 0) : 99;
    }));
  }
  int filled = 0;
  for (const pid_t child : children) {
    const int end = end_of(child);
    EXPECT_LE(end, 1);
    filled += end;
  }
  EXPECT_EQ(filled, 1);
  EXPECT_EQ(fills->load(), 1);
  EXPECT_EQ(shared_bytes({block_->path()}), kBytes);
  EXPECT_TRUE(is_whole(**open()));  // all of them are gone
}

// Who plans meanwhile finds that memory gone, and must find it here.
TEST_F(SharedBlockTest, CountsWhatIsBeingFilled) {
  ASSERT_TRUE(open([&](absl::Span<std::byte> memory) {
                EXPECT_EQ(shared_bytes({block_->path()}), kBytes);
                return fill(memory);
              }).ok());
  const auto other = *SharedBlock::create("parvl-test");
  EXPECT_EQ(shared_bytes({block_->path(), other->path(), "/nowhere"}), kBytes);
  ASSERT_TRUE(SharedContent::open(other->path(), 5, "others", [](auto) { return absl::OkStatus(); }).ok());
  EXPECT_EQ(shared_bytes({block_->path(), other->path()}), kBytes + 5);
}

// Also where too much is asked for: what there is was asked after it was given back.
TEST_F(SharedBlockTest, WhatADeadFillerTookIsThereForTheNext) {
  const pid_t first = run_apart([&] {
    (void)open([](absl::Span<std::byte>) {
      ::raise(SIGKILL);
      return absl::OkStatus();
    });
    return 0;
  });
  EXPECT_EQ(end_of(first), -SIGKILL);
  const absl::Status refused = open(fill, "weights", int64_t{1} << 50).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(shared_bytes({block_->path()}), 0);
}

TEST_F(SharedBlockTest, WhoDiesInTheMiddleLeavesItToTheNext) {
  const pid_t first = run_apart([&] {
    (void)open([](absl::Span<std::byte> memory) {
      std::memset(memory.data(), 0xab, memory.size() / 2);
      ::raise(SIGKILL);
      return absl::OkStatus();
    });
    return 0;
  });
  EXPECT_EQ(end_of(first), -SIGKILL);
  EXPECT_EQ(shared_bytes({block_->path()}), kBytes);  // taken, and had again
  const auto content = open();
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_TRUE((*content)->filled_here());
  EXPECT_TRUE(is_whole(**content));
}

TEST_F(SharedBlockTest, WhoFailsLeavesItToTheNext) {
  const auto failed = open([](absl::Span<std::byte>) { return absl::InvalidArgumentError("a bad file"); });
  EXPECT_EQ(failed.status(), absl::InvalidArgumentError("a bad file"));
  EXPECT_EQ(shared_bytes({block_->path()}), 0);
  EXPECT_TRUE(is_whole(**open()));
}

TEST_F(SharedBlockTest, SomethingElseIsNotTakenForIt) {
  ASSERT_TRUE(open().ok());
  EXPECT_EQ(open(fill, "others").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(open(fill, "weights", kBytes + 1).status().message(), HasSubstr("not the 3000002"));
  EXPECT_TRUE(open().ok());
}

TEST_F(SharedBlockTest, NobodyWritesIt) {
  const auto content = *open();
  const pid_t writer = run_apart([&] {
    std::signal(SIGSEGV, SIG_DFL);  // a sanitizer has a handler of its own
    const_cast<std::byte*>(content->data())[7] = std::byte{1};
    return 0;
  });
  EXPECT_EQ(end_of(writer), -SIGSEGV);
  EXPECT_TRUE(is_whole(*content));
}

TEST_F(SharedBlockTest, OutlivesWhoHeldItOpenWhereItIsMapped) {
  const auto content = *open();
  const std::string path = block_->path();
  block_.reset();
  EXPECT_TRUE(is_whole(*content));
  EXPECT_TRUE(absl::IsNotFound(SharedContent::open(path, kBytes, "weights", fill).status()));
}

TEST_F(SharedBlockTest, MemoryThatIsNotThereIsAnError) {
  EXPECT_EQ(open(fill, "weights", int64_t{1} << 50).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(is_whole(**open()));
}

}  // namespace
}  // namespace parvl
