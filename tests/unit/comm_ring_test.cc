// The ring of messages: in order and whole at every reader whatever its size, and nobody waits for who is gone.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "parvl/comm/ring/shared_ring.h"
#include "tests/unit/child_process.h"

namespace parvl {
namespace {

std::unique_ptr<RingWriter> make_ring(int64_t readers, int64_t bytes) {
  auto ring = RingWriter::create(readers, bytes);
  PARVL_CHECK(ring.ok(), "a ring");
  return *std::move(ring);
}

std::unique_ptr<RingReader> open_ring(const std::string& path, int64_t reader) {
  auto ring = RingReader::open(path, reader);
  PARVL_CHECK(ring.ok(), "a reader");
  return *std::move(ring);
}

// Bytes that say which message they are of.
std::string message(size_t index, size_t size) {
  std::string out(size, '\0');
  for (size_t i = 0; i < size; ++i) out[i] = static_cast<char>((index * 131 + i * 7 + i / 250) % 251);
  return out;
}

RC_GTEST_PROP(SharedRing, EveryReaderGetsEveryMessageWholeAndInOrder, ()) {
  const int64_t readers = *rc::gen::inRange<int64_t>(1, 4), bytes = *rc::gen::inRange<int64_t>(1, 100);
  const auto sizes = *rc::gen::container<std::vector<size_t>>(rc::gen::inRange<size_t>(0, 300));
  const bool late = *rc::gen::arbitrary<bool>();  // readers that come when the ring is full
  const auto writer = make_ring(readers, bytes);
  const std::string path = writer->path();
  std::vector<std::vector<std::string>> got(static_cast<size_t>(readers));
  std::vector<std::thread> threads;
  const auto read_all = [&](int64_t reader) {
    const auto ring = open_ring(path, reader);
    for (;;) {
      auto next = ring->read();
      if (!next.ok()) return;
      got[static_cast<size_t>(reader)].push_back(*std::move(next));
    }
  };
  std::thread writing([&] {
    for (size_t i = 0; i < sizes.size(); ++i) RC_ASSERT(writer->write(message(i, sizes[i])).ok());
    writer->close();
  });
  if (late) std::this_thread::yield();
  for (int64_t reader = 0; reader < readers; ++reader) threads.emplace_back(read_all, reader);
  writing.join();
  for (std::thread& thread : threads) thread.join();
  for (const auto& messages : got) {
    RC_ASSERT(messages.size() == sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) RC_ASSERT(messages[i] == message(i, sizes[i]));
  }
}

TEST(SharedRing, OneInstanceIsReadThroughManyTimesItsSize) {
  const auto writer = make_ring(2, 1000);
  std::atomic<int64_t> read = 0;
  std::vector<std::thread> threads;
  for (int64_t reader = 0; reader < 2; ++reader) {
    threads.emplace_back([&, reader] {
      const auto ring = open_ring(writer->path(), reader);
      for (size_t i = 0; i < 2000; ++i) {
        const auto next = ring->read();
        ASSERT_TRUE(next.ok()) << next.status();
        ASSERT_EQ(*next, message(i, i % 77));
        ++read;
      }
    });
  }
  for (size_t i = 0; i < 2000; ++i) ASSERT_TRUE(writer->write(message(i, i % 77)).ok());
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(read, 4000);
}

TEST(SharedRing, ClosingEndsAReadAndAWriteThatWait) {
  const auto writer = make_ring(2, 64);
  const auto reader = open_ring(writer->path(), 0);
  std::thread reading([&] {
    EXPECT_EQ(*reader->read(), "first");
    EXPECT_TRUE(absl::IsUnavailable(reader->read().status()));  // the second never came whole
  });
  ASSERT_TRUE(writer->write("first").ok());
  std::thread writing([&] {  // reader 1 has not come, so that it is waited for
    EXPECT_TRUE(absl::IsUnavailable(writer->write(std::string(1000, 'x'))));
  });
  writer->close();
  writing.join();
  reading.join();
  EXPECT_TRUE(absl::IsUnavailable(writer->write("late")));
}

TEST(SharedRing, WhatWasWrittenWholeIsReadAfterTheClose) {
  const auto writer = make_ring(1, 64);
  const auto reader = open_ring(writer->path(), 0);
  ASSERT_TRUE(writer->write("a").ok());
  ASSERT_TRUE(writer->write("").ok());
  writer->close();
  EXPECT_EQ(*reader->read(), "a");
  EXPECT_EQ(*reader->read(), "");
  EXPECT_TRUE(absl::IsUnavailable(reader->read().status()));
}

TEST(SharedRing, AReaderThatLeavesIsNotWaitedFor) {
  const auto writer = make_ring(1, 16);
  open_ring(writer->path(), 0).reset();
  EXPECT_TRUE(absl::IsUnavailable(writer->write(std::string(100, 'x'))));
}

TEST(SharedRing, RefusesWhatIsNoRingOfIts) {
  const auto writer = make_ring(2, 64);
  EXPECT_TRUE(absl::IsInvalidArgument(RingReader::open(writer->path(), 2).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(RingReader::open(writer->path(), -1).status()));
  EXPECT_TRUE(absl::IsUnavailable(RingReader::open("/proc/self/fd/9999", 0).status()));
  EXPECT_TRUE(absl::IsUnavailable(RingReader::open("/dev/null", 0).status()));
}

TEST(SharedRingProcesses, AKilledReaderEndsTheWrite) {
  const auto writer = make_ring(1, 64);
  ChildProcess child([path = writer->path()](LineSocket& parent) {
    const auto ring = open_ring(path, 0);
    parent.say(*ring->read());
    parent.hear();
  });
  ASSERT_TRUE(writer->write("hello").ok());
  EXPECT_EQ(child.talk().hear(), "hello");
  std::thread killing([&] { child.kill(); });
  EXPECT_TRUE(absl::IsUnavailable(writer->write(std::string(10'000, 'x'))));
  killing.join();
}

TEST(SharedRingProcesses, AKilledWriterEndsTheRead) {
  ChildProcess child([](LineSocket& parent) {
    const auto ring = make_ring(1, 64);
    parent.say(ring->path());
    parent.hear();  // it has opened it
    PARVL_CHECK(ring->write("last").ok(), "it has room");
    parent.say("written");
    parent.hear();
  });
  const auto reader = open_ring(child.talk().hear(), 0);
  child.talk().say("open");
  EXPECT_EQ(child.talk().hear(), "written");
  child.kill();
  EXPECT_EQ(*reader->read(), "last");  // what is there is read
  EXPECT_TRUE(absl::IsUnavailable(reader->read().status()));
}

TEST(SharedRingProcesses, AStoppedReaderHoldsTheWriterBackAndNothingIsLost) {
  const auto writer = make_ring(1, 64);
  ChildProcess child([path = writer->path()](LineSocket& parent) {
    const auto ring = open_ring(path, 0);
    parent.say("open");
    size_t right = 0;
    for (size_t i = 0; i < 200; ++i) right += *ring->read() == message(i, i);
    parent.say(std::to_string(right));
    parent.hear();
  });
  EXPECT_EQ(child.talk().hear(), "open");
  child.stop();
  std::atomic<bool> done = false;
  std::thread writing([&] {
    for (size_t i = 0; i < 200; ++i) EXPECT_TRUE(writer->write(message(i, i)).ok());
    done = true;
  });
  ::usleep(300'000);  // longer than a look at the reader
  EXPECT_FALSE(done);
  child.go_on();
  writing.join();
  EXPECT_EQ(child.talk().hear(), "200");
}

}  // namespace
}  // namespace parvl
