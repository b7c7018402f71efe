// Decoding in a worker gives what decoding here gives; a worker that dies or hangs costs one picture.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "parvl/media/sandbox.h"
#include "parvl/media/worker_pool.h"

namespace parvl {
namespace {

using testing::HasSubstr;

class MediaWorkerTest : public testing::Test {
 protected:
  MediaWorkerTest() {
    const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    options_.program = (here.parent_path() / "parvl-media-worker").string();
  }

  std::unique_ptr<MediaWorkerPool> start() {
    auto pool = MediaWorkerPool::start(options_, clock_);
    if (!pool.ok()) throw std::runtime_error(pool.status().ToString());
    return *std::move(pool);
  }

  static std::string picture(int width, int height) {
    Image image{width, height, {}};
    for (int i = 0; i < width * height * 3; ++i) image.rgb.push_back(static_cast<uint8_t>(i * 31 % 256));
    return encode_png(image);
  }

  RealClock clock_;
  MediaWorkerOptions options_;
  ImageProcessor processor_{ImageProcessorConfig{.patch_size = 4, .min_pixels = 1024, .max_pixels = 65536}};
};

TEST_F(MediaWorkerTest, GivesWhatDecodingHereGives) {
  const auto pool = start();
  for (const std::string& file : {picture(64, 64), picture(100, 37), picture(64, 64).substr(0, 60), std::string("text"),
                                  std::string(), picture(900, 4)}) {
    const auto here = LocalImages().prepare(file, {}, processor_), there = pool->prepare(file, {}, processor_);
    ASSERT_EQ(there.status(), here.status());
    if (!here.ok()) continue;
    EXPECT_EQ(there->patches, here->patches);
    EXPECT_EQ(there->key, here->key);
    EXPECT_EQ(there->grid_h, here->grid_h);
    EXPECT_EQ(there->grid_w, here->grid_w);
    EXPECT_EQ(there->num_tokens(), here->num_tokens());
  }
  ImageLimits small;
  small.max_pixels = 100;
  EXPECT_TRUE(absl::IsResourceExhausted(pool->prepare(picture(64, 64), small, processor_).status()));
  small.max_bytes = 10;
  EXPECT_TRUE(absl::IsResourceExhausted(pool->prepare(picture(64, 64), small, processor_).status()));
}

TEST_F(MediaWorkerTest, AWorkerThatDiedAtRestCostsNothing) {
  const auto pool = start();
  const pid_t first = pool->pids().at(0);
  ::kill(first, SIGKILL);
  siginfo_t ended;
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(first), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(pool->prepare(picture(8, 8), {}, processor_).ok());
  EXPECT_NE(pool->pids().at(0), first);
}

TEST_F(MediaWorkerTest, TooMuchMemoryIsThePicturesFaultAlone) {
  if (!kSandboxBoundsMemory) GTEST_SKIP() << "this build's sandbox does not bound memory";
  options_.memory_bytes = 64 << 20;
  const std::string large = encode_png({5000, 5000, std::vector<uint8_t>(75'000'000, 9)});
  const auto pool = start();
  EXPECT_TRUE(pool->prepare(picture(64, 64), {}, processor_).ok());
  const absl::Status status = pool->prepare(large, {}, processor_).status();  // 75 MB of pixels
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("memory"));
  EXPECT_TRUE(pool->prepare(picture(64, 64), {}, processor_).ok());
}

// A worker that is stopped answers nothing, as one that hangs.
TEST_F(MediaWorkerTest, AHangEndsAtTheTimeLimit) {
  options_.workers = 1;
  options_.timeout = std::chrono::milliseconds(5000);
  const auto pool = start();
  const std::string small = picture(8, 8);
  ::kill(pool->pids().at(0), SIGSTOP);
  const absl::Status status = pool->prepare(small, {}, processor_).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("took too long"));
  EXPECT_TRUE(pool->prepare(small, {}, processor_).ok());
}

// A program that ends by a signal once it has a picture: by the picture's fault, or from outside.
TEST_F(MediaWorkerTest, AKillFromOutsideIsNotThePicturesFault) {
  const auto status_when_it_ends_by = [&](const std::string& signal) {
    const std::string program = testing::TempDir() + "ends_by_" + signal;
    std::ofstream(program) << "#!/bin/bash\nprintf x >&3\nread -r -N1 byte <&3\nkill -" << signal << " $$\n";
    std::filesystem::permissions(program, std::filesystem::perms::owner_all);
    options_.program = program;
    const absl::Status status = start()->prepare(picture(8, 8), {}, processor_).status();
    std::filesystem::remove(program);
    return status;
  };
  const absl::Status outside = status_when_it_ends_by("KILL"), fault = status_when_it_ends_by("SEGV");
  EXPECT_TRUE(absl::IsUnavailable(outside)) << outside;
  EXPECT_THAT(std::string(outside.message()), HasSubstr("killed from outside"));
  EXPECT_TRUE(absl::IsInvalidArgument(fault)) << fault;
}

TEST_F(MediaWorkerTest, ManyCallersShareFewWorkers) {
  const auto pool = start();
  std::vector<std::future<bool>> all;
  for (int i = 0; i < 40; ++i) {
    all.push_back(
        std::async(std::launch::async, [&, i] { return pool->prepare(picture(8 + i, 16), {}, processor_).ok(); }));
  }
  for (auto& one : all) EXPECT_TRUE(one.get());
  EXPECT_LE(pool->pids().size(), 2u);
}

TEST_F(MediaWorkerTest, StartingSaysWhatIsMissing) {
  options_.program = "/no/such/program";
  EXPECT_THAT(std::string(MediaWorkerPool::start(options_, clock_).status().message()), HasSubstr("/no/such/program"));
}

// What the sandbox forbids and what it allows, each in a child that gave up its rights.
TEST(Sandbox, LeavesComputingAndOneDescriptor) {
  const auto in_child = [](const std::function<bool()>& body) {
    int sockets[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      const bool ready = give_up_rights(int64_t{4} << 30, sockets[1]).ok();
      const char answer = !ready ? 'x' : body() ? 'y' : 'n';
      const bool said = ::write(sockets[1], &answer, 1) == 1;
      ::_exit(said ? 0 : 1);
    }
    ::close(sockets[1]);
    char answer = '?';
    const bool heard = ::read(sockets[0], &answer, 1) == 1;
    ::close(sockets[0]);
    int status = 0;
    ::waitpid(child, &status, 0);
    return heard ? answer : '!';
  };
  EXPECT_EQ(in_child([] { return ::open("/etc/passwd", O_RDONLY) == -1 && errno == EPERM; }), 'y');
  EXPECT_EQ(in_child([] { return ::socket(AF_INET, SOCK_STREAM, 0) == -1 && errno == EPERM; }), 'y');
  EXPECT_EQ(in_child([] { return ::fork() == -1 && errno == EPERM; }), 'y');
  EXPECT_EQ(in_child([] {
              char* const nothing[] = {nullptr};
              return ::execve("/bin/true", nothing, nothing) == -1 && errno == EPERM;
            }),
            'y');
  EXPECT_EQ(in_child([] { return ::unlink("/tmp/x") == -1 && errno == EPERM; }), 'y');
  EXPECT_EQ(in_child([] { return ::write(STDOUT_FILENO, "x", 1) == -1 && errno == EBADF; }), 'y');
  EXPECT_EQ(in_child([] { return std::vector<char>(100 << 20, 'x').back() == 'x'; }), 'y');
}

}  // namespace
}  // namespace parvl
