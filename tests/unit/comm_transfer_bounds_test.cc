// The limits of transfers: how much memory a source gives out, what a sink keeps mapped, and when room is told.
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>

#include "tests/unit/transfer_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

// The bound is the credit: a reader that keeps what it has makes `reserve` fail, and nothing grows.
TEST(TransferBoundTest, FullMeansFullAndRoomIsTold) {
  std::atomic<int> told{0};
  TransferSourceOptions options = source_options();
  options.arena_bytes = 8 << 20;
  options.on_room = [&told] { ++told; };
  const auto source = start_source(options);
  const auto sink = start_sink(sink_options());
  const TransferHandle first = publish(*source, one_tensor(4 << 20), 1);
  const TransferHandle second = publish(*source, one_tensor(4 << 20), 2);
  auto view = sink->pull(first, 10);
  ASSERT_TRUE(view.ok());
  source->drop(first.item);
  const auto full = source->reserve(one_tensor(2));
  EXPECT_EQ(full.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(source->reserve(one_tensor(2), 0.02).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(source->reserve(one_tensor((8 << 20) + 2)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(source->counters().quarantined_bytes, 4 << 20);
  EXPECT_EQ(told, 0);
  std::thread reader([&view] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    view = TransferView();
  });
  auto region = source->reserve(one_tensor(4 << 20), 20);
  reader.join();
  EXPECT_TRUE(region.ok()) << region.status();
  EXPECT_TRUE(soon([&] { return told == 1; }));
  region = TransferRegion();  // not published: free again
  EXPECT_EQ(source->counters().used_bytes, 4 << 20);
  EXPECT_LE(source->counters().free_bytes, 4 << 20);
}

TEST(TransferBoundTest, ItemsAreCounted) {
  TransferSourceOptions options = source_options();
  options.max_items = 3;
  const auto source = start_source(options);
  std::vector<TransferHandle> handles;
  for (uint64_t i = 0; i < 3; ++i) handles.push_back(publish(*source, one_tensor(8), i));
  EXPECT_THAT(source->reserve(one_tensor(8)).status().message(), HasSubstr("all 3 items"));
  EXPECT_TRUE(source->drop(handles[1].item));
  EXPECT_TRUE(source->reserve(one_tensor(8)).ok());
}

// What is kept for readers leaves the process the descriptors that it needs to let them in.
TEST(TransferBoundTest, MemoryDoesNotTakeTheLastDescriptors) {
  const auto source = start_source();
  rlimit was{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &was), 0);
  const int next = ::dup(0);
  ::close(next);
  const rlimit few{static_cast<rlim_t>(next) + 164, was.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<TransferHandle> handles;
  for (;;) {
    auto region = source->reserve(one_tensor(8));
    if (!region.ok()) {
      EXPECT_EQ(region.status().code(), absl::StatusCode::kResourceExhausted);
      break;
    }
    handles.push_back(source->publish(*std::move(region), {}));
  }
  EXPECT_GT(handles.size(), 50u);
  EXPECT_LT(handles.size(), 128u);
  EXPECT_TRUE(start_sink(sink_options())->pull(handles.back(), 10).ok()) << "a reader comes in";
  for (const TransferHandle& handle : handles) source->drop(handle.item);
  EXPECT_TRUE(source->reserve(one_tensor(1 << 20)).ok()) << "free memory of another size makes room";
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &was), 0);
}

TEST(TransferBoundTest, AReaderWithoutADescriptorLeftSaysSo) {
  const auto source = start_source();
  const auto sink = start_sink(sink_options(TransferLane::kSharedMemory));
  const TransferHandle first = publish(*source, one_tensor(1 << 20), 1);
  const TransferHandle second = publish(*source, one_tensor(2 << 20), 2);
  ASSERT_TRUE(sink->pull(first, 10).ok()) << "from now on they are connected";
  rlimit was{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &was), 0);
  const int next = ::dup(0);
  ::close(next);
  const rlimit none{static_cast<rlim_t>(next), was.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status status = sink->pull(second, 10).status();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &was), 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.message(), HasSubstr("`ulimit -n`"));
  const auto view = sink->pull(second, 10);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_TRUE(has_bytes_of(*view, 2));
}

// Sizes that change make free memory of old sizes go, not the bound.
TEST(TransferBoundTest, FreeMemoryIsGivenBackForOtherSizes) {
  TransferSourceOptions options = source_options();
  options.arena_bytes = 4 << 20;
  const auto source = start_source(options);
  const auto sink = start_sink(sink_options());
  for (uint64_t i = 0; i < 40; ++i) {
    const TransferHandle handle = publish(*source, one_tensor(int64_t{64} << 10 << i % 6), i);
    const auto view = sink->pull(handle, 10);
    ASSERT_TRUE(view.ok()) << view.status();
    EXPECT_TRUE(has_bytes_of(*view, i));
    EXPECT_TRUE(source->drop(handle.item));
    const TransferSourceCounters counts = source->counters();
    EXPECT_LE(counts.used_bytes + counts.free_bytes, 4 << 20);
  }
}

TEST(TransferBoundTest, MappingsAreKeptWithinTheirLimit) {
  const auto source = start_source();
  TransferSinkOptions options = sink_options();
  options.max_mapped_bytes = 3 << 20;
  const auto sink = start_sink(options);
  std::vector<TransferHandle> handles;
  for (uint64_t i = 0; i < 6; ++i) handles.push_back(publish(*source, one_tensor(1 << 20), i));
  const auto view = sink->pull(handles[0], 10);
  ASSERT_TRUE(view.ok());
  for (int round = 0; round < 3; ++round) {
    for (uint64_t i = 0; i < 6; ++i) {
      const auto other = sink->pull(handles[i], 10);
      ASSERT_TRUE(other.ok()) << other.status();
      EXPECT_TRUE(has_bytes_of(*other, i));
      EXPECT_LE(sink->counters().mapped_bytes, 3 << 20);
    }
  }
  EXPECT_TRUE(has_bytes_of(*view, 0));
}

TEST(TransferBoundTest, MappingsAreForgottenWhenNobodyUsesThem) {
  const auto source = start_source();
  TransferSinkOptions options = sink_options();
  options.forget_s = 0.05;
  const auto sink = start_sink(options);
  const TransferHandle handle = publish(*source, one_tensor(1 << 20), 1);
  auto view = sink->pull(handle, 10);
  ASSERT_TRUE(view.ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  EXPECT_EQ(sink->counters().mapped_bytes, 1 << 20);
  view = TransferView();
  EXPECT_TRUE(soon([&] { return sink->counters().mapped_bytes == 0; }));
  EXPECT_TRUE(sink->pull(handle, 10).ok());
}

// More than one connection may hold: the sink opens more.
TEST(TransferBoundTest, HundredsOfViewsAtOnce) {
  const auto source = start_source();
  const auto sink = start_sink(sink_options());
  std::vector<TransferView> views;
  for (uint64_t i = 0; i < 300; ++i) {
    auto view = sink->pull(publish(*source, one_tensor(1000), i), 10);
    ASSERT_TRUE(view.ok()) << view.status();
    views.push_back(std::move(*view));
  }
  EXPECT_EQ(sink->counters().views, 300);
  EXPECT_EQ(source->counters().connections, 4);
  for (uint64_t i = 0; i < 300; ++i) EXPECT_TRUE(has_bytes_of(views[i], i));
  for (int64_t i = 1; i <= 300; ++i) EXPECT_TRUE(source->drop(TransferId{i}));
  views.clear();
  EXPECT_TRUE(soon([&] { return source->counters().used_bytes == 0; }));
}

TEST(TransferBoundTest, NothingIsAnItemToo) {
  const auto source = start_source();
  const TransferHandle handle = publish(*source, {{"none", DType::kFloat32, {0}}}, 1);
  for (const TransferLane lane : {TransferLane::kSharedMemory, TransferLane::kTcp}) {
    const auto view = start_sink(sink_options(lane))->pull(handle, 10);
    ASSERT_TRUE(view.ok()) << view.status();
    EXPECT_EQ(view->tensors()[0].bytes, 0);
  }
  TransferSinkOptions small = sink_options(TransferLane::kTcp);
  small.max_bytes = 100;
  const TransferHandle large = publish(*source, one_tensor(102), 1);
  EXPECT_EQ(start_sink(small)->pull(large, 10).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace parvl
