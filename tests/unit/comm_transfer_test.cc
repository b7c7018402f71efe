// Transfers within one process: what arrives, what is refused, and when memory is free again.
#include <atomic>

#include "tests/unit/transfer_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

class TransferTest : public testing::TestWithParam<TransferLane> {
 protected:
  std::unique_ptr<TransferSink> sink(TransferSinkOptions options = sink_options()) {
    options.only = GetParam();
    return start_sink(options);
  }
};

TEST_P(TransferTest, TensorsArriveByName) {
  const auto source = start_source();
  const auto sink = this->sink();
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const TransferHandle sent = publish(*source, features(static_cast<int64_t>(seed * seed * 7)), seed);
    const auto handle = TransferHandle::from_text(sent.to_text());
    ASSERT_TRUE(handle.ok()) << handle.status();
    const auto view = sink->pull(*handle, 10);
    ASSERT_TRUE(view.ok()) << view.status();
    EXPECT_EQ(view->lane(), GetParam());
    EXPECT_TRUE(has_bytes_of(*view, seed));
    EXPECT_FALSE(has_bytes_of(*view, seed + 1));
    ASSERT_TRUE(view->find("deepstack.0"));
    const TransferTensor& deep = view->tensors()[*view->find("deepstack.0")];
    EXPECT_EQ(deep.dtype, DType::kFloat32);
    EXPECT_EQ(deep.shape, (std::vector<int64_t>{static_cast<int64_t>(seed * seed * 7), 3, 7}));
    EXPECT_FALSE(view->find("deepstack"));
    EXPECT_TRUE(source->drop(sent.item));
  }
  EXPECT_TRUE(soon([&] { return source->counters().used_bytes == 0; }));
  const TransferSinkCounters counts = sink->counters();
  const LaneCounters& lane = GetParam() == TransferLane::kTcp ? counts.tcp : counts.shared_memory;
  const LaneCounters& other = GetParam() == TransferLane::kTcp ? counts.shared_memory : counts.tcp;
  EXPECT_EQ(lane.items, 20);
  EXPECT_EQ(other.items, 0);
  EXPECT_EQ(counts.fallbacks, 0);
  EXPECT_EQ(source->counters().published_bytes, lane.bytes);
}

TEST_P(TransferTest, BytesGoIntoTheCallersTensors) {
  const auto source = start_source();
  const auto sink = this->sink();
  const TransferHandle handle = publish(*source, features(5000), 9);
  std::vector<std::string> memory;
  for (const TransferTensor& tensor : handle.tensors) memory.emplace_back(static_cast<size_t>(tensor.bytes), 'x');
  std::vector<absl::Span<std::byte>> out;
  for (std::string& m : memory) out.emplace_back(reinterpret_cast<std::byte*>(m.data()), m.size());
  const auto lane = sink->pull_into(handle, out, 10);
  ASSERT_TRUE(lane.ok()) << lane.status();
  EXPECT_EQ(*lane, GetParam());
  for (size_t i = 0; i < memory.size(); ++i) EXPECT_EQ(memory[i], expected_bytes(handle.tensors[i], i, 9)) << i;
  // Nobody reads it any more, so memory is free at once.
  EXPECT_TRUE(source->drop(handle.item));
  EXPECT_TRUE(soon([&] { return source->counters().used_bytes == 0; }));
  out[0] = out[0].subspan(1);
  EXPECT_EQ(sink->pull_into(handle, out, 10).status().code(), absl::StatusCode::kInvalidArgument);
  out.pop_back();
  EXPECT_EQ(sink->pull_into(handle, out, 10).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(TransferTest, DamageIsFound) {
  const auto source = start_source();
  const auto sink = this->sink();
  auto region = source->reserve(features(3000));
  ASSERT_TRUE(region.ok());
  fill(*region, 4);
  std::byte* const last = region->data(3) + 1;
  const TransferHandle handle = source->publish(std::move(*region), {});
  // What a writer that was not told would do; once the source's thread has told that it has sent everything.
  const auto flip = [&](int64_t pulls) {
    EXPECT_TRUE(soon([&] {
      const TransferSourceCounters counts = source->counters();
      return counts.tcp.bytes + counts.shared_memory.bytes == pulls * handle.payload_bytes();
    }));
    *last ^= std::byte{16};
  };
  ASSERT_TRUE(sink->pull(handle, 10).ok());
  flip(1);
  const auto view = sink->pull(handle, 10);
  EXPECT_EQ(view.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(view.status().message(), HasSubstr("checksum does not match"));
  EXPECT_EQ(sink->counters().damaged, 1);
  flip(2);
  EXPECT_TRUE(sink->pull(handle, 10).ok());
}

TEST_P(TransferTest, DroppedItemsAreNotThere) {
  const auto source = start_source();
  const auto sink = this->sink();
  const TransferHandle handle = publish(*source, features(10), 1);
  EXPECT_TRUE(source->drop(handle.item));
  EXPECT_FALSE(source->drop(handle.item));
  EXPECT_FALSE(source->drop(TransferId{999}));
  const auto view = sink->pull(handle, 10);
  EXPECT_EQ(view.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(view.status().message(), HasSubstr("encode-0"));
  EXPECT_EQ(source->counters().missing, 1);
  EXPECT_EQ(sink->counters().failed, 1);
}

TEST_P(TransferTest, AnEndedLeaseFreesTheMemory) {
  const auto source = start_source();
  const auto sink = this->sink();
  const TransferHandle handle = publish(*source, features(1000), 1, {.seconds = 0.05});
  EXPECT_TRUE(soon([&] { return source->counters().used_bytes == 0; }));
  EXPECT_EQ(source->counters().expired_items, 1);
  EXPECT_EQ(sink->pull(handle, 10).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(TransferTest, AnItemDropsItselfAfterItsPulls) {
  const auto source = start_source();
  const auto sink = this->sink();
  const TransferHandle handle = publish(*source, features(1000), 1, {.pulls = 2});
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(sink->pull(handle, 10).ok());
  EXPECT_TRUE(soon([&] { return source->counters().used_bytes == 0; }));
  EXPECT_EQ(sink->pull(handle, 10).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(TransferTest, AnotherEpochIsRefused) {
  const auto source = start_source();
  const auto sink = this->sink();
  TransferHandle handle = publish(*source, features(10), 1);
  for (const int64_t epoch : {2, 4}) {
    handle.epoch = epoch;
    const auto view = sink->pull(handle, 10);
    EXPECT_EQ(view.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(view.status().message(), HasSubstr("is in epoch 3"));
  }
  EXPECT_EQ(source->counters().stale, 2);
  handle.epoch = 3;
  handle.source = "encode-1";
  EXPECT_EQ(sink->pull(handle, 10).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(source->counters().strangers, 1);
}

TEST_P(TransferTest, AStrangerGetsNothing) {
  const auto source = start_source();
  const TransferHandle handle = publish(*source, features(10), 1);
  TransferSinkOptions options = sink_options();
  options.token = "a token of sixteen bytes or mora";
  EXPECT_EQ(sink(options)->pull(handle, 10).status().code(), absl::StatusCode::kPermissionDenied);
  options.token += "e";
  EXPECT_EQ(sink(options)->pull(handle, 10).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(source->counters().strangers, 2);
  EXPECT_TRUE(sink()->pull(handle, 10).ok());
}

TEST_P(TransferTest, ASourceThatHasGoneIsUnavailable) {
  auto source = start_source();
  const auto sink = this->sink();
  const TransferHandle handle = publish(*source, features(10), 5);
  auto view = sink->pull(handle, 10);
  ASSERT_TRUE(view.ok());
  source.reset();
  EXPECT_TRUE(soon([&] { return sink->counters().mapped_bytes == 0; }));  // also when nobody asks for more
  EXPECT_TRUE(has_bytes_of(*view, 5));                                    // what was pulled stays
  EXPECT_EQ(sink->pull(handle, 10).status().code(), absl::StatusCode::kUnavailable);
}

// A fenced sink's later pulls are refused; with a new epoch it may begin again.
TEST_P(TransferTest, AFencedReaderGetsNothing) {
  const auto source = start_source();
  const auto sink = this->sink();
  const TransferHandle handle = publish(*source, features(10), 5);
  ASSERT_TRUE(sink->pull(handle, 10).ok());
  EXPECT_EQ(source->fence("llm-1", 9), 0);
  EXPECT_EQ(source->fence("llm-0", 0), 0);
  ASSERT_TRUE(sink->pull(handle, 10).ok());
  EXPECT_EQ(source->fence("llm-0", 1), 1);
  EXPECT_EQ(sink->pull(handle, 10).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_GE(source->counters().stale, 1);
  TransferSinkOptions next = sink_options();
  next.epoch = 2;
  EXPECT_TRUE(this->sink(next)->pull(handle, 10).ok());
}

TEST_P(TransferTest, ManyThreadsPullAtOnce) {
  TransferSourceOptions options = source_options();
  options.on_room = [] {};
  const auto source = start_source(options);
  const auto sink = this->sink();
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 25; ++i) {
        auto region = source->reserve(features(500), 10);
        if (!region.ok()) continue;
        fill(*region, t * 100 + i);
        const TransferHandle handle = source->publish(std::move(*region), {.pulls = 1});
        const auto view = sink->pull(handle, 10);
        if (view.ok() && has_bytes_of(*view, t * 100 + i)) ++good;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 100);
  EXPECT_TRUE(soon([&] { return source->counters().used_bytes == 0; }));
}

INSTANTIATE_TEST_SUITE_P(Lanes, TransferTest, testing::Values(TransferLane::kSharedMemory, TransferLane::kTcp),
                         [](const auto& lane) { return lane.param == TransferLane::kTcp ? "Tcp" : "SharedMemory"; });

// What a stopped process's item becomes: it goes on to read what it had.
TEST(TransferFenceTest, AFencedViewIsNeverWrittenAgain) {
  TransferSourceOptions options = source_options();
  options.arena_bytes = 1 << 20;
  const auto source = start_source(options);
  const auto sink = start_sink(sink_options());
  const TransferHandle handle = publish(*source, one_tensor(1 << 20), 1);
  const auto view = sink->pull(handle, 10);
  ASSERT_TRUE(view.ok());
  EXPECT_TRUE(source->drop(handle.item));
  EXPECT_EQ(source->reserve(one_tensor(1 << 20)).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(source->fence("llm-0", 1), 1);
  EXPECT_EQ(source->counters().given_up_bytes, 1 << 20);
  for (uint64_t i = 2; i < 6; ++i) EXPECT_TRUE(source->drop(publish(*source, one_tensor(1 << 20), i).item));
  EXPECT_TRUE(has_bytes_of(*view, 1));
}

// The same without anybody who fences.
TEST(TransferFenceTest, AReaderThatKeepsDroppedMemoryIsCutOff) {
  TransferSourceOptions options = source_options();
  options.patience_s = 0.05;
  const auto source = start_source(options);
  const auto sink = start_sink(sink_options());
  const TransferHandle handle = publish(*source, one_tensor(1 << 20), 1);
  const auto view = sink->pull(handle, 10);
  ASSERT_TRUE(view.ok());
  EXPECT_TRUE(source->drop(handle.item));
  EXPECT_TRUE(soon([&] { return source->counters().given_up_bytes == 1 << 20; }));
  EXPECT_EQ(source->counters().fenced, 1);
  EXPECT_TRUE(soon([&] { return source->counters().connections == 0; }));
  EXPECT_TRUE(has_bytes_of(*view, 1));
  // It is not fenced for ever: its next pull is as any other's.
  const TransferHandle next = publish(*source, one_tensor(1 << 20), 2);
  EXPECT_TRUE(soon([&] { return sink->pull(next, 10).ok(); }));
}

TEST(TransferLaneTest, OneHostIsSharedMemoryOthersAreTcp) {
  const auto source = start_source();
  const auto sink = start_sink(sink_options());
  TransferHandle handle = publish(*source, features(10), 1);
  EXPECT_EQ(sink->pull(handle, 10)->lane(), TransferLane::kSharedMemory);
  handle.host = "another";
  EXPECT_EQ(sink->pull(handle, 10)->lane(), TransferLane::kTcp);
  EXPECT_EQ(sink->counters().fallbacks, 0);
  const auto only = start_sink(sink_options(TransferLane::kSharedMemory));
  EXPECT_EQ(only->pull(handle, 10).status().code(), absl::StatusCode::kUnavailable);
  handle.tcp_address.clear();
  EXPECT_THAT(sink->pull(handle, 10).status().message(), HasSubstr("has no TCP lane"));
}

TEST(TransferOptionsTest, WrongOnesAreNamed) {
  const auto start = [](const std::function<void(TransferSourceOptions&)>& change) {
    TransferSourceOptions options = source_options();
    change(options);
    return std::string(TransferSource::start(options).status().message());
  };
  EXPECT_THAT(start([](auto& o) { o.token = "short"; }), HasSubstr("token has 16 to 256 bytes, not 5"));
  EXPECT_THAT(start([](auto& o) { o.name = ""; }), HasSubstr("name has 1 to 64 bytes"));
  EXPECT_THAT(start([](auto& o) { o.arena_bytes = 0; }), HasSubstr("limits"));
  EXPECT_THAT(start([](auto& o) { o.tcp_listen = "somewhere:80"; }), HasSubstr("no numeric address"));
  EXPECT_THAT(start([](auto& o) { o.tcp_listen = "0.0.0.0:0"; }), HasSubstr("tcp_host"));
  EXPECT_EQ(start([](auto& o) { o.tcp_listen = ""; }), "");
}

TEST(TransferLaneTest, ASourceOnAllAddressesSaysWhichOneToUse) {
  TransferSourceOptions options = source_options();
  options.tcp_listen = "0.0.0.0:0";
  options.tcp_host = "127.0.0.1";
  const auto source = start_source(options);
  const auto sink = start_sink(sink_options(TransferLane::kTcp));
  const TransferHandle handle = publish(*source, features(10), 1);
  EXPECT_THAT(handle.tcp_address, testing::StartsWith("127.0.0.1:"));
  EXPECT_TRUE(sink->pull(handle, 10).ok());
}

// One host, but the socket is not reached: TCP, which is told and counted; not where shared memory is demanded.
TEST(TransferLaneTest, AFallBackIsCounted) {
  const auto source = start_source();
  const auto sink = start_sink(sink_options());
  TransferHandle handle = publish(*source, features(10), 1);
  handle.local_address += "-elsewhere";
  EXPECT_EQ(sink->pull(handle, 10)->lane(), TransferLane::kTcp);
  EXPECT_EQ(sink->counters().fallbacks, 1);
  const auto only = start_sink(sink_options(TransferLane::kSharedMemory));
  EXPECT_EQ(only->pull(handle, 10).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(only->counters().fallbacks, 0);
}

}  // namespace
}  // namespace parvl
