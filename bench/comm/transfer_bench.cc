// What a transfer between two processes costs: from a handle in hand to checked bytes in the receiver's own memory,
// against a memcpy of as many bytes in the same run. The two take turns over sets of buffers that do not fit into a
// core's cache (cold), or over one buffer each (warm). Times are those of the fastest tenth: on a machine that does
// other things too, a transfer also waits for the other process to run, which the ratio of the medians shows. `view`:
// shared memory is mapped and checked, not copied.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "parvl/base/check.h"
#include "parvl/comm/transfer/transfer_sink.h"
#include "parvl/comm/transfer/transfer_source.h"

namespace parvl {
namespace {

constexpr int64_t kBytes = 8 << 20;
constexpr size_t kItems = 24;
constexpr int kTurns = 20;  // through all items
constexpr char kToken[] = "a token for the benchmark alone";
const RealClock kClock;

double share_below(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(static_cast<double>(values.size()) * share)];
}
double median(const std::vector<double>& values) { return share_below(values, 0.5); }

double timed_ms(const std::function<void()>& body) {
  const int64_t start = kClock.now_ns();
  body();
  return static_cast<double>(kClock.now_ns() - start) * 1e-6;
}

// Publishes the items, tells their handles line by line, and stays until the other end is closed.
void send_items(int talk) {
  TransferSourceOptions options;
  options.name = "encode-0";
  options.token = kToken;
  options.clock = &kClock;
  options.tcp_listen = "127.0.0.1:0";
  const auto source = TransferSource::start(options);
  PARVL_CHECK(source.ok(), "a source");
  std::vector<double> publish_ms;
  for (size_t i = 0; i < kItems; ++i) {
    auto region = (*source)->reserve({{"features", DType::kBFloat16, {kBytes / 2 / 4096, 4096}}});
    PARVL_CHECK(region.ok(), "room");
    std::memset(region->data(0), static_cast<int>(i), kBytes);
    TransferHandle handle;
    publish_ms.push_back(timed_ms([&] { handle = (*source)->publish(std::move(*region), {.seconds = 3600}); }));
    const std::string line = handle.to_text() + "\n";
    PARVL_CHECK(::write(talk, line.data(), line.size()) == static_cast<ssize_t>(line.size()), "the other process");
  }
  const std::string cost = std::to_string(median(publish_ms)) + "\n";
  PARVL_CHECK(::write(talk, cost.data(), cost.size()) == static_cast<ssize_t>(cost.size()), "the other process");
  char byte = 0;
  while (::read(talk, &byte, 1) > 0) continue;
}

std::string read_line(int talk) {
  std::string line;
  for (char c = 0; ::read(talk, &c, 1) == 1 && c != '\n';) line += c;
  return line;
}

class Receiver {
 public:
  explicit Receiver(std::vector<TransferHandle> handles)
      : handles_(std::move(handles)), from_(kItems * kBytes, 'a'), to_(kItems * kBytes, 'b') {}

  void row(const char* what, TransferLane lane, size_t items, bool copies) {
    TransferSinkOptions options;
    options.name = "llm-0";
    options.token = kToken;
    options.clock = &kClock;
    options.only = lane;
    const auto sink = TransferSink::start(options);
    PARVL_CHECK(sink.ok(), "a sink");
    std::vector<double> mine, plain;
    for (int turn = 0; turn < kTurns; ++turn) {
      for (size_t i = 0; i < std::max<size_t>(items, 4); ++i) {
        const size_t at = i % items;
        char* const to = to_.data() + at * kBytes;
        plain.push_back(timed_ms([&] { std::memcpy(to, from_.data() + at * kBytes, kBytes); }));
        const absl::Span<std::byte> out(reinterpret_cast<std::byte*>(to), kBytes);
        const double ms = timed_ms([&] {
          const bool ok =
              copies ? (*sink)->pull_into(handles_[at], {out}, 10).ok() : (*sink)->pull(handles_[at], 10).ok();
          PARVL_CHECK(ok, "a transfer");
        });
        if (turn > 0) mine.push_back(ms);  // the first maps the memory
        PARVL_CHECK(!copies || (to[0] == static_cast<char>(at) && to[kBytes - 1] == static_cast<char>(at)),
                    "the bytes");
      }
    }
    const double ms = share_below(mine, 0.1), copy_ms = share_below(plain, 0.1);
    std::printf("%-44s %8.3f %8.2f %12.3f %7.2f %11.2f\n", what, ms, kBytes / ms * 1e-6, copy_ms, copy_ms / ms,
                median(plain) / median(mine));
  }

 private:
  const std::vector<TransferHandle> handles_;
  std::vector<char> from_, to_;
};

void receive_items(int talk) {
  std::vector<TransferHandle> handles;
  for (size_t i = 0; i < kItems; ++i) {
    auto handle = TransferHandle::from_text(read_line(talk));
    PARVL_CHECK(handle.ok(), "a handle");
    handles.push_back(std::move(*handle));
  }
  const std::string publish_ms = read_line(talk);
  Receiver receiver(std::move(handles));
  std::printf("%-44s %8s %8s %12s %7s %11s\n", "8 MB of features to another process", "ms", "GB/s", "memcpy, ms",
              "ratio", "of medians");
  receiver.row("shared memory, cold", TransferLane::kSharedMemory, kItems, true);
  receiver.row("shared memory, warm", TransferLane::kSharedMemory, 1, true);
  receiver.row("shared memory, a view, cold", TransferLane::kSharedMemory, kItems, false);
  receiver.row("TCP on one host, cold", TransferLane::kTcp, kItems, true);
  std::printf("The ratio is memcpy's time over the transfer's, checksum included; publishing 8 MB takes %s ms.\n",
              publish_ms.c_str());
}

}  // namespace
}  // namespace parvl

int main() {
  int ends[2];
  PARVL_CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "a pair of sockets");
  const pid_t child = ::fork();
  PARVL_CHECK(child >= 0, "a process");
  if (child == 0) {
    ::close(ends[0]);
    parvl::send_items(ends[1]);
    ::_exit(0);
  }
  ::close(ends[1]);
  parvl::receive_items(ends[0]);
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
}
