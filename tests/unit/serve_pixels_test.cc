// Pixels from a decoding process straight to where instances pull them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "parvl/media/worker_pool.h"
#include "parvl/serve/pools/pixels.h"

namespace parvl {
namespace {

using testing::HasSubstr;

constexpr char kToken[] = "a token of the run";

class PixelsTest : public testing::Test {
 protected:
  PixelsTest() {
    const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    options_.program = (here.parent_path() / "parvl-media-worker").string();
    TransferSinkOptions sink;
    sink.name = "instance-0";
    sink.token = kToken;
    sink.clock = &clock_;
    sink_ = *TransferSink::start(sink);
  }

  void start(int64_t bytes) {
    store_ = *PixelStore::start(kToken, bytes, clock_);
    options_.store = store_;
    auto pool = MediaWorkerPool::start(options_, clock_);
    if (!pool.ok()) throw std::runtime_error(pool.status().ToString());
    pool_ = *std::move(pool);
  }
  static std::string picture(int width, int height, int step = 31) {
    Image image{width, height, {}};
    for (int i = 0; i < width * height * 3; ++i) image.rgb.push_back(static_cast<uint8_t>(i * step % 256));
    return encode_png(image);
  }
  absl::StatusOr<ProcessedImage> prepare(const std::string& file) { return pool_->prepare(file, {}, processor_); }
  absl::Status pull(const ProcessedImage& image, ProcessedImage& out) {
    out = image;
    return pull_pixels(*sink_, image.place->handle(), 10, out);
  }
  static std::string python() {
    const std::unique_ptr<FILE, int (*)(FILE*)> found(::popen("command -v python3", "r"), ::pclose);
    std::string out(4096, '\0');
    if (std::fgets(out.data(), static_cast<int>(out.size()), found.get()) == nullptr) return "";
    return out.substr(0, out.find('\n'));
  }
  // Of /proc/self/status, in bytes.
  static int64_t memory(const std::string& name) {
    std::ifstream file("/proc/self/status");
    for (std::string line; std::getline(file, line);) {
      if (line.rfind(name + ":", 0) == 0) return std::stoll(line.substr(name.size() + 1)) * 1024;
    }
    throw std::runtime_error("no " + name);
  }

  RealClock clock_;
  MediaWorkerOptions options_;
  ImageProcessor processor_{ImageProcessorConfig{.patch_size = 4, .min_pixels = 1024, .max_pixels = 1 << 22}};
  std::shared_ptr<PixelStore> store_;
  std::unique_ptr<MediaWorkerPool> pool_;
  std::unique_ptr<TransferSink> sink_;
};

TEST_F(PixelsTest, AreThoseOfDecodingHere) {
  start(64 << 20);
  for (const std::string& file : {picture(64, 64), picture(100, 37), picture(512, 300)}) {
    const auto here = *LocalImages().prepare(file, {}, processor_);
    const auto image = prepare(file);
    ASSERT_TRUE(image.ok()) << image.status();
    EXPECT_TRUE(image->patches.empty());
    EXPECT_EQ(image->key, here.key);
    ProcessedImage pulled;
    ASSERT_TRUE(pull(*image, pulled).ok()) << "checksum included";
    EXPECT_EQ(pulled.patches, here.patches);
  }
  EXPECT_EQ(prepare("text").status(), LocalImages().prepare("text", {}, processor_).status());
  const std::string cut = picture(64, 64).substr(0, 100);
  EXPECT_EQ(prepare(cut).status(), LocalImages().prepare(cut, {}, processor_).status());
  EXPECT_EQ(store_->counters().items, 0) << "all images are gone, and so is what broke in the middle";
}

// Not one byte more passes through this process for an image of a thousand times as many pixels, nor does it ever hold
// them.
TEST_F(PixelsTest, PassThroughNobodysHandsInBetween) {
  start(int64_t{1} << 30);
  const auto bytes_for = [&](const std::string& file) {
    const MediaWorkerCounters before = pool_->counters();
    const auto image = prepare(file);
    EXPECT_TRUE(image.ok()) << image.status();
    const MediaWorkerCounters after = pool_->counters();
    EXPECT_GE(after.sent_bytes - before.sent_bytes, static_cast<int64_t>(file.size()));
    return std::pair(after.sent_bytes - before.sent_bytes - static_cast<int64_t>(file.size()),
                     after.received_bytes - before.received_bytes);
  };
  const std::string large = encode_png({2048, 2048, std::vector<uint8_t>(size_t{3} * 2048 * 2048, 9)});
  const auto small_one = bytes_for(picture(64, 64));
  const int64_t anonymous = memory("RssAnon"), shared = memory("RssShmem");
  std::vector<ProcessedImage> images;
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(bytes_for(large), small_one);
    images.push_back(*prepare(large));
  }
  const int64_t each = images[0].num_values() * static_cast<int64_t>(sizeof(float));
  EXPECT_GT(each, 90 << 20) << "a large one";
  EXPECT_LT(memory("RssAnon") - anonymous, each / 4);
  EXPECT_LT(memory("RssShmem") - shared, each / 4);
  EXPECT_GE(store_->counters().used_bytes, 6 * each);
}

TEST_F(PixelsTest, AFullStoreTurnsAwayOneImageAndHoldsUpNobody) {
  start(1 << 20);
  std::vector<ProcessedImage> held;
  absl::Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) {
    auto image = prepare(picture(256, 128, 31 + i));
    status = image.status();
    if (image.ok()) held.push_back(*std::move(image));
  }
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no room for its pixels"));
  EXPECT_GE(held.size(), 1u);
  const std::vector<pid_t> workers = pool_->pids();
  EXPECT_TRUE(prepare(picture(8, 8)).ok()) << "a small one finds room";
  EXPECT_EQ(pool_->pids(), workers) << "nobody was killed for it";
  held.clear();
  EXPECT_TRUE(prepare(picture(256, 128)).ok());
}

// A program that takes the memory and dies: what it may have written to goes to others only after its death.
TEST_F(PixelsTest, AWorkerThatDiesInTheMiddleCostsItsPictureAlone) {
  const std::string program = testing::TempDir() + "dies_with_the_memory";
  std::ofstream(program)
      << "#!" + python() +
             "\n"
             "import os, socket, struct\n"
             "s = socket.socket(fileno=3)\n"
             "s.sendall(b'x')\n"
             "head = s.recv(128, socket.MSG_WAITALL)\n"
             "s.recv(struct.unpack('Q', head[:8])[0], socket.MSG_WAITALL)\n"
             "s.sendall(struct.pack('=iIiiiii', 0, 0, 1, 16, 16, 96, 2) + bytes(32) + bytes(4) + bytes(8))\n"
             "data, fds, *_ = socket.recv_fds(s, 8, 1)\n"
             "os.pwrite(fds[0], b'half', 0)\n"
             "os.abort()\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  const std::string good = options_.program;
  options_.program = program;
  start(1 << 20);
  const absl::Status status = prepare(picture(64, 64)).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the decoder died over it"));
  EXPECT_EQ(store_->counters().items, 0);
  EXPECT_GT(store_->counters().free_bytes + store_->counters().used_bytes, 0) << "it had been given memory";
  std::filesystem::remove(program);
}

TEST_F(PixelsTest, OneThatIsStoppedInTheMiddleKeepsNobodyElseWaiting) {
  options_.workers = 2;
  start(64 << 20);
  const auto stopped = prepare(picture(64, 64));
  ASSERT_TRUE(stopped.ok());
  const pid_t first = pool_->pids().at(0);
  ::kill(first, SIGSTOP);
  const int64_t sent = pool_->counters().sent_bytes;
  auto waiting = std::async(std::launch::async, [&] { return prepare(picture(100, 100)).ok(); });
  while (pool_->counters().sent_bytes == sent) std::this_thread::yield();
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(prepare(picture(64 + i, 64)).ok());
  ::kill(first, SIGCONT);
  EXPECT_TRUE(waiting.get());
}

}  // namespace
}  // namespace parvl
