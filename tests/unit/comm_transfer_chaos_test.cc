// Transfers between processes that are killed and stopped: nobody reads another's bytes, and memory, descriptors and
// mappings go back to where they were.
#include <filesystem>
#include <fstream>

#include "tests/unit/child_process.h"
#include "tests/unit/transfer_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

constexpr int64_t kItem = 4 << 20;

// What a process holds: "descriptors/mappings of transfer memory".
std::string holdings() {
  int descriptors = 0, mappings = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++descriptors;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) mappings += line.find("memfd:parvl") != std::string::npos;
  return absl::StrCat(descriptors, "/", mappings);
}
size_t named_shared_memory() {
  size_t out = 0;
  if (!std::filesystem::exists("/dev/shm")) return 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    out += entry.path().filename().string().find("parvl") != std::string::npos;
  }
  return out;
}

TransferHandle heard_handle(const LineSocket& talk) {
  auto out = TransferHandle::from_text(talk.hear());
  PARVL_CHECK(out.ok(), "a handle");
  return *out;
}

// "same", or what is wrong; then says what the process holds.
void reader_process(LineSocket& parent, std::optional<TransferLane> lane) {
  const auto sink = start_sink(sink_options(lane));
  std::optional<TransferView> view;
  TransferHandle handle;
  for (std::string order = parent.hear(); !order.empty(); order = parent.hear()) {
    if (order == "pull") {
      view.reset();
      handle = heard_handle(parent);
      auto pulled = sink->pull(handle, 20);
      if (pulled.ok()) view = std::move(*pulled);
      parent.say(pulled.ok() ? "ok" : pulled.status().ToString());
    } else if (order == "check") {
      parent.say(view && has_bytes_of(*view, static_cast<uint64_t>(handle.item.value)) ? "same" : "other");
    } else if (order == "drop") {
      view.reset();
      parent.say(holdings());
    }
  }
}

// Pulls the item in a circle, into the same memory, until something else than success; says that.
void circling_process(LineSocket& parent, TransferLane lane) {
  const auto sink = start_sink(sink_options(lane));
  const TransferHandle handle = heard_handle(parent);
  std::string memory(static_cast<size_t>(handle.payload_bytes()), ' ');
  const absl::Span<std::byte> out(reinterpret_cast<std::byte*>(memory.data()), memory.size());
  const std::string expected = expected_bytes(handle.tensors[0], 0, static_cast<uint64_t>(handle.item.value));
  parent.say("begins");
  for (;;) {
    memory.assign(memory.size(), ' ');
    const auto pulled = sink->pull_into(handle, {out}, 20);
    if (pulled.ok() && memory == expected) continue;
    return parent.say(pulled.ok() ? "wrong bytes" : absl::StatusCodeToString(pulled.status().code()));
  }
}

// The seed is the item's number.
TransferHandle publish_next(TransferSource& source, int64_t bytes, const TransferLease& lease = {}) {
  auto region = source.reserve(one_tensor(bytes), 20);
  PARVL_CHECK(region.ok(), region.status().ToString().c_str());
  fill(*region, static_cast<uint64_t>(region->item().value));
  return source.publish(std::move(*region), lease);
}

void source_process(LineSocket& parent) {
  const auto source = start_source();
  for (std::string order = parent.hear(); !order.empty(); order = parent.hear()) {
    parent.say(publish_next(*source, kItem).to_text());
  }
}

class TransferChaosTest : public testing::TestWithParam<TransferLane> {};

TEST_P(TransferChaosTest, AReaderThatIsKilledFreesItsItem) {
  ChildProcess reader([](LineSocket& parent) { reader_process(parent, GetParam()); });
  const auto source = start_source();
  const TransferHandle handle = publish_next(*source, kItem);
  reader.talk().say("pull");
  reader.talk().say(handle.to_text());
  ASSERT_EQ(reader.talk().hear(), "ok");
  EXPECT_TRUE(source->drop(handle.item));
  const bool shared = GetParam() == TransferLane::kSharedMemory;
  EXPECT_TRUE(soon([&] { return source->counters().quarantined_bytes == (shared ? kItem : 0); }));
  reader.kill();
  EXPECT_TRUE(soon([&] { return source->counters().used_bytes == 0 && source->counters().connections == 0; }));
  EXPECT_EQ(source->counters().given_up_bytes, 0);
}

// At any moment of a pull.
TEST_P(TransferChaosTest, ReadersThatAreKilledWhilePullingFreeTheirItems) {
  for (int round = 0; round < 8; ++round) {
    ChildProcess reader([](LineSocket& parent) { circling_process(parent, GetParam()); });
    const auto source = start_source();
    const TransferHandle handle = publish_next(*source, kItem);
    reader.talk().say(handle.to_text());
    EXPECT_EQ(reader.talk().hear(), "begins");
    std::this_thread::sleep_for(std::chrono::microseconds(1000 + 1373 * round));
    reader.kill();
    EXPECT_TRUE(source->drop(handle.item));
    EXPECT_TRUE(soon([&] { return source->counters().used_bytes == 0 && source->counters().connections == 0; }));
    EXPECT_EQ(source->counters().given_up_bytes, 0);
  }
}

TEST_P(TransferChaosTest, ASourceThatIsKilledIsUnavailable) {
  const std::string before = holdings();
  for (int round = 0; round < 5; ++round) {
    ChildProcess child([](LineSocket& parent) { source_process(parent); });
    child.talk().say("publish");
    const TransferHandle handle = heard_handle(child.talk());
    const auto sink = start_sink(sink_options(GetParam()));
    std::thread killer([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(20'000 + 1373 * round));
      child.kill();
    });
    absl::StatusOr<TransferView> view;
    const double start = test_clock().now_seconds();
    do {
      view = sink->pull(handle, 20);
      EXPECT_TRUE(!view.ok() || has_bytes_of(*view, static_cast<uint64_t>(handle.item.value)));
    } while (view.ok());
    killer.join();
    EXPECT_EQ(view.status().code(), absl::StatusCode::kUnavailable) << view.status();
    EXPECT_LT(test_clock().now_seconds() - start, 8);
    EXPECT_TRUE(soon([&] { return sink->counters().mapped_bytes == 0; }));  // the dead one's memory is let go
  }
  EXPECT_EQ(holdings(), before);
}

// A stopped source holds nobody up for longer than the timeout, and goes on afterwards.
TEST_P(TransferChaosTest, ASourceThatIsStoppedIsWaitedForInVain) {
  ChildProcess child([](LineSocket& parent) { source_process(parent); });
  child.talk().say("publish");
  const TransferHandle handle = heard_handle(child.talk());
  const auto sink = start_sink(sink_options(GetParam()));
  ASSERT_TRUE(sink->pull(handle, 20).ok());
  child.stop();
  EXPECT_EQ(sink->pull(handle, 0.1).status().code(), absl::StatusCode::kDeadlineExceeded);
  TransferSinkOptions impatient = sink_options(GetParam());
  impatient.silence_s = 0.1;
  EXPECT_EQ(start_sink(impatient)->pull(handle, 20).status().code(), absl::StatusCode::kUnavailable);
  child.go_on();
  const auto view = sink->pull(handle, 20);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_TRUE(has_bytes_of(*view, 1));
}

// Stopped at any moment of a pull, fenced, and its memory's place written by others: it sees its own item or an error.
TEST_P(TransferChaosTest, AReaderThatWakesUpAfterAFenceHarmsNobody) {
  for (int round = 0; round < 8; ++round) {
    ChildProcess reader([](LineSocket& parent) { circling_process(parent, GetParam()); });
    TransferSourceOptions options = source_options();
    options.arena_bytes = 2 * kItem;
    options.silence_s = 0.2;
    const auto source = start_source(options);
    const TransferHandle handle = publish_next(*source, kItem);
    reader.talk().say(handle.to_text());
    EXPECT_EQ(reader.talk().hear(), "begins");
    std::this_thread::sleep_for(std::chrono::microseconds(1000 + 1373 * round));
    reader.stop();
    EXPECT_TRUE(source->drop(handle.item));
    source->fence("llm-0", 1);
    for (int i = 0; i < 6; ++i) EXPECT_TRUE(source->drop(publish_next(*source, kItem).item));
    reader.go_on();
    EXPECT_THAT(reader.talk().hear(), testing::AnyOf("NOT_FOUND", "FAILED_PRECONDITION", "UNAVAILABLE"));
  }
}

INSTANTIATE_TEST_SUITE_P(Lanes, TransferChaosTest, testing::Values(TransferLane::kSharedMemory, TransferLane::kTcp),
                         [](const auto& lane) { return lane.param == TransferLane::kTcp ? "Tcp" : "SharedMemory"; });

TEST(TransferProcessTest, AStoppedReadersViewStaysWhatItWas) {
  ChildProcess reader([](LineSocket& parent) { reader_process(parent, TransferLane::kSharedMemory); });
  TransferSourceOptions options = source_options();
  options.arena_bytes = kItem;
  const auto source = start_source(options);
  const TransferHandle handle = publish_next(*source, kItem);
  reader.talk().say("pull");
  reader.talk().say(handle.to_text());
  ASSERT_EQ(reader.talk().hear(), "ok");
  reader.stop();
  EXPECT_TRUE(source->drop(handle.item));
  EXPECT_EQ(source->reserve(one_tensor(kItem), 0.05).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(source->fence("llm-0", 1), 1);
  TransferHandle next;
  for (int i = 0; i < 5; ++i) {
    next = publish_next(*source, kItem);
    EXPECT_TRUE(i == 4 || source->drop(next.item));
  }
  reader.go_on();
  reader.talk().say("check");
  EXPECT_EQ(reader.talk().hear(), "same");
  reader.talk().say("pull");
  reader.talk().say(next.to_text());
  EXPECT_THAT(reader.talk().hear(), HasSubstr("was fenced"));
  EXPECT_EQ(source->counters().given_up_bytes, kItem);
}

// After many items, and after chaos, nothing is left over on either side.
TEST(TransferProcessTest, AThousandItemsLeaveNothing) {
  const std::string at_first = holdings();
  for (const TransferLane lane : {TransferLane::kSharedMemory, TransferLane::kTcp}) {
    ChildProcess reader([lane](LineSocket& parent) { reader_process(parent, lane); });
    const std::string before = holdings();
    std::string reader_holds;
    auto source = start_source();
    for (int i = 0; i < 1000; ++i) {
      const TransferHandle handle = publish_next(*source, 100'000 + i % 7 * 50'000, {.pulls = 1});
      reader.talk().say("pull");
      reader.talk().say(handle.to_text());
      ASSERT_EQ(reader.talk().hear(), "ok");
      reader.talk().say("check");
      ASSERT_EQ(reader.talk().hear(), "same");
      reader.talk().say("drop");
      const std::string holds = reader.talk().hear();
      if (i == 100) reader_holds = holds;  // all sizes have been there
      ASSERT_TRUE(i < 100 || holds == reader_holds) << holds << " after " << reader_holds;
    }
    EXPECT_TRUE(soon([&] { return source->counters().used_bytes == 0; }));
    source.reset();
    EXPECT_EQ(holdings(), before);
  }
  EXPECT_EQ(holdings(), at_first);
  EXPECT_EQ(named_shared_memory(), 0u);
}

}  // namespace
}  // namespace parvl
