// Bytes that come over sockets: what is understood, and what happens to a connection that breaks the rules.
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "parvl/base/checksum.h"
#include "parvl/comm/transfer/transfer_slab.h"
#include "parvl/comm/transfer/transfer_socket.h"
#include "parvl/comm/transfer/transfer_wire.h"
#include "tests/unit/transfer_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

TransferHandle some_handle() {
  TransferHandle out;
  out.source = "encode-0";
  out.epoch = 7;
  out.item = TransferId{12};
  out.host = "boot net:[1]";
  out.local_address = "parvl/encode-0/e7/1.0";
  out.tcp_address = "[::1]:99";
  out.slab = 5;
  out.checksum = 0xfedcba9876543210;
  out.tensors = features(3);
  PARVL_CHECK(place_tensors(out.tensors).ok(), "a right layout");
  return out;
}

TEST(TransferHandleTest, GoesThroughBytesAndText) {
  const TransferHandle handle = some_handle();
  for (const auto& again : {TransferHandle::decode(handle.encode()), TransferHandle::from_text(handle.to_text())}) {
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->encode(), handle.encode());
    EXPECT_EQ(again->tensors[1].name, "deepstack.0");
    EXPECT_EQ(again->tensors[1].offset, handle.tensors[1].offset);
    EXPECT_EQ(again->payload_bytes(), 3 * 129 * 2 + 3 * 21 * 4 + 2);
    EXPECT_GE(again->extent_bytes(), again->payload_bytes());
  }
}

TEST(TransferHandleTest, IsNotBelieved) {
  const std::string bytes = some_handle().encode();
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(TransferHandle::decode(bytes.substr(0, size)).ok());
  EXPECT_FALSE(TransferHandle::decode(bytes + "x").ok());
  EXPECT_FALSE(TransferHandle::from_text("no base 64 !").ok());
  TransferHandle handle = some_handle();
  handle.tensors[0].shape = {int64_t{1} << 40, int64_t{1} << 40};
  EXPECT_THAT(TransferHandle::decode(handle.encode()).status().message(), HasSubstr("'features' is over"));
  handle.tensors[0].shape = {-1};
  EXPECT_THAT(TransferHandle::decode(handle.encode()).status().message(), HasSubstr("a dim of -1"));
  handle.tensors[0] = handle.tensors[1];
  EXPECT_THAT(TransferHandle::decode(handle.encode()).status().message(), HasSubstr("twice"));
  handle.tensors.clear();
  EXPECT_FALSE(TransferHandle::decode(handle.encode()).ok());
}

TEST(TransferWireTest, MessagesComeInPieces) {
  TransferHello hello;
  hello.token = kTestToken;
  hello.source = "s";
  hello.reader = "r";
  hello.reader_epoch = -4;
  const std::string bytes = encode_message(hello) + encode_message(TransferPull{TransferId{3}, false, 77});
  for (const size_t piece : {size_t{1}, size_t{5}, bytes.size()}) {
    MessageReader reader;
    std::vector<TransferMessage> messages;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      reader.append(std::string_view(bytes).substr(at, piece));
      for (;;) {
        const auto message = reader.next();
        ASSERT_TRUE(message.ok());
        if (!*message) break;
        messages.push_back(**message);
      }
    }
    ASSERT_EQ(messages.size(), 2u);
    EXPECT_EQ(std::get<TransferHello>(messages[0]).reader_epoch, -4);
    EXPECT_EQ(std::get<TransferHello>(messages[0]).token, kTestToken);
    EXPECT_EQ(std::get<TransferPull>(messages[1]).credit, 77);
    EXPECT_FALSE(std::get<TransferPull>(messages[1]).wants_descriptor);
  }
}

TEST(TransferWireTest, AddressesAreNumeric) {
  EXPECT_EQ(join_address("10.0.0.3", 4711), "10.0.0.3:4711");
  EXPECT_EQ(join_address("fd00::3", 4711), "[fd00::3]:4711");
  for (const char* wrong : {"", "localhost:80", "10.0.0.3", "10.0.0.3:", "10.0.0.3:65536", "::1:x", "[::1:80"}) {
    EXPECT_EQ(listen_tcp(wrong).status().code(), absl::StatusCode::kInvalidArgument) << wrong;
  }
}

TEST(TransferWireTest, TheChecksumSeesEveryByteAndItsPlace) {
  std::string data(600'000, 'a');
  const uint64_t before = tensor_checksum(data.data(), data.size(), 0);
  std::string copy(data.size(), ' ');
  EXPECT_EQ(copy_with_checksum(copy.data(), data.data(), data.size(), 0), before);
  EXPECT_EQ(copy, data);
  for (const size_t at : {size_t{0}, size_t{262'143}, size_t{262'144}, size_t{599'999}}) {
    data[at] = 'b';
    EXPECT_NE(tensor_checksum(data.data(), data.size(), 0), before);
    data[at] = 'a';
  }
  EXPECT_NE(tensor_checksum(data.data(), data.size(), 1), before);
  EXPECT_EQ(tensor_checksum(data.data(), 0, 5), 5u);
}

TEST(TransferWireTest, MemoryThatCouldShrinkIsRefused) {
  FILE* const file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  EXPECT_FALSE(SharedSlab::map(FileDescriptor(::dup(::fileno(file))), 4096).ok());
  std::fclose(file);
  const auto slab = SharedSlab::create(8192, "test");
  ASSERT_TRUE(slab.ok());
  EXPECT_FALSE(SharedSlab::map(FileDescriptor(::dup((*slab)->read_only_descriptor())), 8193).ok());
  EXPECT_TRUE(SharedSlab::map(FileDescriptor(::dup((*slab)->read_only_descriptor())), 8192).ok());
}

// Also where another still maps it, the memory goes back to the system.
TEST(TransferWireTest, DiscardedMemoryTakesNoRoom) {
  constexpr int64_t kBytes = 8 << 20;
  const auto slab = SharedSlab::create(kBytes, "test");
  ASSERT_TRUE(slab.ok());
  std::memset((*slab)->data(), 1, kBytes);
  const FileDescriptor descriptor(::dup((*slab)->read_only_descriptor()));
  const auto mapped = SharedSlab::map(descriptor, kBytes);
  ASSERT_TRUE(mapped.ok());
  struct stat found {};
  ASSERT_EQ(::fstat(descriptor.get(), &found), 0);
  EXPECT_EQ(found.st_blocks * 512, kBytes);
  (*slab)->discard();
  ASSERT_EQ(::fstat(descriptor.get(), &found), 0);
  EXPECT_EQ(found.st_blocks, 0);
}

// A reader by hand.
class RawReader {
 public:
  RawReader(const TransferHandle& handle, TransferLane lane) {
    const Deadline deadline = deadline_after(test_clock(), 10);
    auto socket = lane == TransferLane::kTcp ? connect_tcp(handle.tcp_address, deadline)
                                             : connect_local(handle.local_address, deadline);
    PARVL_CHECK(socket.ok(), "the source listens");
    socket_ = std::move(*socket);
  }
  void send(const std::string& bytes) const { send_some(socket_.get(), bytes); }
  void hello(const TransferHandle& handle, TransferLane lane) const {
    TransferHello out;
    out.lane = lane;
    out.token = kTestToken;
    out.source = handle.source;
    out.source_epoch = handle.epoch;
    out.reader = "by hand";
    send(encode_message(out));
    EXPECT_EQ(answer().code, absl::StatusCode::kOk);
  }
  TransferAnswer answer() const {
    std::string header = receive(kTransferHeaderBytes);
    const auto length = read_header(header);
    PARVL_CHECK(length.ok(), "an answer");
    return std::get<TransferAnswer>(*decode_message(header, receive(*length)));
  }
  // Less at the end of the connection, or when nothing comes for a while.
  std::string receive(size_t bytes, double patience_s = 10) const {
    std::string out(bytes, '\0');
    size_t done = 0;
    while (done < bytes && wait_for(socket_, POLLIN, deadline_after(test_clock(), patience_s))) {
      const int64_t got = receive_some(socket_.get(), out.data() + done, bytes - done);
      if (got <= 0) break;
      done += static_cast<size_t>(got);
    }
    out.resize(done);
    return out;
  }
  bool was_closed() const {
    char byte = 0;
    for (;;) {
      if (!wait_for(socket_, POLLIN, deadline_after(test_clock(), 10))) return false;
      if (receive_some(socket_.get(), &byte, 1) <= 0) return true;
    }
  }

 private:
  FileDescriptor socket_;
};

class TransferRulesTest : public testing::TestWithParam<TransferLane> {
 protected:
  // What is sent after a good Hello ends the connection and harms nobody else.
  void expect_end(const std::string& bytes) {
    RawReader reader(handle_, GetParam());
    reader.hello(handle_, GetParam());
    const int64_t before = source_->counters().malformed;
    reader.send(bytes);
    EXPECT_TRUE(reader.was_closed());
    EXPECT_TRUE(soon([&] { return source_->counters().malformed == before + 1; }));
  }
  std::unique_ptr<TransferSource> source_ = start_source();
  std::unique_ptr<TransferSink> sink_ = start_sink(sink_options(GetParam()));
  TransferHandle handle_ = publish(*source_, features(100'000), 3);
};

TEST_P(TransferRulesTest, RubbishEndsThatConnectionAlone) {
  const auto view = sink_->pull(handle_, 10);
  ASSERT_TRUE(view.ok());
  Rng rng(11);
  for (int i = 0; i < 30; ++i) {
    const RawReader reader(handle_, GetParam());
    std::string bytes(12 + rng.below(3000), '\0');
    for (char& byte : bytes) byte = static_cast<char>(rng.next());
    reader.send(bytes);
    EXPECT_TRUE(reader.was_closed());
  }
  EXPECT_TRUE(soon([&] { return source_->counters().malformed == 30; }));
  EXPECT_TRUE(has_bytes_of(*view, 3));
  EXPECT_TRUE(sink_->pull(handle_, 10).ok());
}

TEST_P(TransferRulesTest, MessagesOutOfPlaceEndTheConnection) {
  expect_end(encode_message(TransferHello{}));
  expect_end(encode_message(TransferAnswer{}));
  expect_end(encode_message(TransferRelease{handle_.item, true}));
  expect_end(encode_message(TransferCredit{1}));
  const RawReader reader(handle_, GetParam());
  reader.send(encode_message(TransferPull{handle_.item, true, 10}));  // without a Hello
  EXPECT_TRUE(reader.was_closed());
  EXPECT_TRUE(sink_->pull(handle_, 10).ok());
}

TEST_P(TransferRulesTest, TheWrongLaneIsRefused) {
  RawReader reader(handle_, GetParam());
  TransferHello hello;
  hello.lane = GetParam() == TransferLane::kTcp ? TransferLane::kSharedMemory : TransferLane::kTcp;
  hello.token = kTestToken;
  hello.source = handle_.source;
  hello.source_epoch = handle_.epoch;
  reader.send(encode_message(hello));
  EXPECT_TRUE(reader.was_closed());
}

INSTANTIATE_TEST_SUITE_P(Lanes, TransferRulesTest, testing::Values(TransferLane::kSharedMemory, TransferLane::kTcp),
                         [](const auto& lane) { return lane.param == TransferLane::kTcp ? "Tcp" : "SharedMemory"; });

// However large the item is, no more is sent than the reader has room for, and nothing is queued in the sender.
TEST(TransferCreditTest, ASlowReaderGetsWhatItGaveCreditFor) {
  const auto source = start_source();
  const TransferHandle handle = publish(*source, one_tensor(32 << 20), 1);
  const RawReader reader(handle, TransferLane::kTcp);
  reader.hello(handle, TransferLane::kTcp);
  reader.send(encode_message(TransferPull{handle.item, false, 100'000}));
  EXPECT_EQ(reader.answer().payload_bytes, 32 << 20);
  EXPECT_EQ(reader.receive(100'001, 0.3).size(), 100'000u);
  EXPECT_EQ(source->counters().tcp.bytes, 100'000);
  EXPECT_EQ(source->counters().credit_waits, 1);
  reader.send(encode_message(TransferCredit{50'000}));
  EXPECT_EQ(reader.receive(50'001, 0.3).size(), 50'000u);
  EXPECT_EQ(source->counters().tcp.bytes, 150'000);
  // The item is in quarantine for that reader, and free when it goes.
  EXPECT_TRUE(source->drop(handle.item));
  EXPECT_EQ(source->counters().quarantined_bytes, 32 << 20);
  reader.send(encode_message(TransferCredit{int64_t{65} << 20}));
  EXPECT_TRUE(reader.was_closed());
  EXPECT_TRUE(soon([&] { return source->counters().used_bytes == 0; }));
  EXPECT_EQ(source->counters().given_up_bytes, 0);
}

TEST(TransferCreditTest, AnyCreditIsEnough) {
  const auto source = start_source();
  TransferSinkOptions options = sink_options(TransferLane::kTcp);
  for (const int64_t credit : {1, 2, 1000}) {
    options.credit_bytes = credit;
    const TransferHandle handle = publish(*source, one_tensor(credit * 300), 6);
    const auto view = start_sink(options)->pull(handle, 20);
    ASSERT_TRUE(view.ok()) << view.status();
    EXPECT_TRUE(has_bytes_of(*view, 6));
  }
}

TEST(TransferCreditTest, ASilentReaderIsGivenUp) {
  TransferSourceOptions options = source_options();
  options.silence_s = 0.1;
  const auto source = start_source(options);
  const TransferHandle handle = publish(*source, one_tensor(1 << 20), 1);
  const RawReader reader(handle, TransferLane::kTcp);
  reader.hello(handle, TransferLane::kTcp);
  const RawReader stranger(handle, TransferLane::kSharedMemory);
  reader.send(encode_message(TransferPull{handle.item, false, 1000}));
  EXPECT_EQ(reader.answer().code, absl::StatusCode::kOk);
  EXPECT_TRUE(source->drop(handle.item));
  EXPECT_TRUE(reader.was_closed());
  EXPECT_TRUE(stranger.was_closed());
  EXPECT_TRUE(soon([&] { return source->counters().used_bytes == 0; }));
  EXPECT_EQ(source->counters().silent, 2);
}

TEST(TransferCreditTest, ConnectionsAreBounded) {
  TransferSourceOptions options = source_options();
  options.max_connections = 3;
  const auto source = start_source(options);
  const auto sink = start_sink(sink_options(TransferLane::kTcp));
  const TransferHandle handle = publish(*source, one_tensor(100), 1);
  std::vector<std::unique_ptr<RawReader>> strangers;
  for (int i = 0; i < 20; ++i) strangers.push_back(std::make_unique<RawReader>(handle, TransferLane::kTcp));
  EXPECT_TRUE(soon([&] { return source->counters().too_many == 17; }));
  EXPECT_EQ(source->counters().connections, 3);
  EXPECT_TRUE(sink->pull(handle, 10).ok());  // strangers make place for it
  for (int i = 0; i < 2; ++i) {
    strangers.push_back(std::make_unique<RawReader>(handle, TransferLane::kTcp));
    strangers.back()->hello(handle, TransferLane::kTcp);
  }
  const RawReader one_more(handle, TransferLane::kTcp);
  EXPECT_TRUE(one_more.was_closed());
  EXPECT_TRUE(sink->pull(handle, 10).ok());
}

}  // namespace
}  // namespace parvl
