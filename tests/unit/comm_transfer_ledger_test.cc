// Who may write where: whatever readers and owners do, memory that somebody may still see is not given out again, and
// none is lost.
#include <gmock/gmock.h>
#include <rapidcheck.h>

#include <cstring>
#include <deque>

#include "parvl/base/check.h"
#include "parvl/comm/transfer/transfer_ledger.h"

namespace parvl {
namespace {

constexpr int64_t kPage = 4096;
constexpr LedgerLimits kLimits{16 * kPage, 6, 3};

std::shared_ptr<const TransferContent> content(int64_t bytes) {
  auto out = std::make_shared<TransferContent>();
  out->parts = {{0, bytes}};
  out->payload_bytes = bytes;
  return out;
}

TransferId published(TransferLedger& ledger, int64_t bytes, int64_t lease_end_ns = 1000, int64_t pulls = 0) {
  const auto item = ledger.reserve(bytes);
  PARVL_CHECK(item.ok(), "there must be room");
  ledger.publish(*item, content(bytes), lease_end_ns, pulls);
  return *item;
}

TEST(TransferLedgerTest, SizesAreUsedAgain) {
  TransferLedger ledger({100 * kPage, 10, 3}, "test");
  const TransferId first = published(ledger, 8 * kPage);
  const int64_t slab = ledger.memory(first).slab;
  ledger.drop(first, 0);
  EXPECT_NE(ledger.memory(published(ledger, 4 * kPage)).slab, slab);  // half of it would be wasted
  EXPECT_EQ(ledger.memory(published(ledger, 8 * kPage - 100)).slab, slab);
}

TEST(TransferLedgerTest, AReaderIsQuarantineUntilItReleases) {
  TransferLedger ledger(kLimits, "test");
  ASSERT_TRUE(ledger.admit(ReaderId{1}, {"a", 1, TransferLane::kSharedMemory}).ok());
  const TransferId item = published(ledger, kPage);
  ASSERT_TRUE(ledger.acquire(ReaderId{1}, item, 0).ok());
  ASSERT_TRUE(ledger.acquire(ReaderId{1}, item, 0).ok());
  EXPECT_TRUE(ledger.drop(item, 5));
  EXPECT_EQ(ledger.counters().quarantined_bytes, kPage);
  EXPECT_TRUE(ledger.release(ReaderId{1}, item, true, 6));
  EXPECT_EQ(ledger.counters().quarantined_bytes, kPage);
  EXPECT_FALSE(ledger.take_freed());
  EXPECT_TRUE(ledger.release(ReaderId{1}, item, true, 6));
  EXPECT_EQ(ledger.counters().quarantined_bytes, 0);
  EXPECT_TRUE(ledger.take_freed());
  EXPECT_FALSE(ledger.take_freed());
  EXPECT_FALSE(ledger.release(ReaderId{1}, item, true, 6));
}

TEST(TransferLedgerTest, AReaderHoldsNoMoreThanItsShare) {
  TransferLedger ledger(kLimits, "test");
  ASSERT_TRUE(ledger.admit(ReaderId{1}, {"a", 1, TransferLane::kSharedMemory}).ok());
  const TransferId item = published(ledger, kPage);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(ledger.acquire(ReaderId{1}, item, 0).ok());
  EXPECT_EQ(ledger.acquire(ReaderId{1}, item, 0).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(TransferLedgerTest, LeasesAndPatienceEndInTime) {
  TransferLedger ledger(kLimits, "test");
  ASSERT_TRUE(ledger.admit(ReaderId{1}, {"a", 1, TransferLane::kSharedMemory}).ok());
  ASSERT_TRUE(ledger.admit(ReaderId{2}, {"b", 1, TransferLane::kTcp}).ok());
  const TransferId item = published(ledger, kPage, 100);
  EXPECT_EQ(ledger.next_expiry_ns(50), 100);
  ASSERT_TRUE(ledger.acquire(ReaderId{1}, item, 99).ok());
  ASSERT_TRUE(ledger.acquire(ReaderId{2}, item, 99).ok());
  EXPECT_TRUE(absl::IsNotFound(ledger.acquire(ReaderId{1}, item, 100).status()));
  EXPECT_TRUE(ledger.expire(99, 50).empty());
  EXPECT_TRUE(ledger.expire(100, 50).empty());
  EXPECT_EQ(ledger.next_expiry_ns(50), 150);
  EXPECT_EQ(ledger.next_expiry_ns(0), INT64_MAX);
  EXPECT_TRUE(ledger.expire(149, 50).empty());
  EXPECT_EQ(ledger.expire(150, 50), (std::vector<ReaderId>{{1}, {2}}));
  EXPECT_EQ(ledger.counters().quarantined_bytes, kPage);  // the TCP sender is still at it
  ledger.leave(ReaderId{2});
  EXPECT_EQ(ledger.counters().used_bytes, 0);
  EXPECT_EQ(ledger.counters().given_up_bytes, kPage);
}

// Of any size from the first test on; rapidcheck's own ranges begin small.
int64_t below(int64_t bound) { return *rc::gen::resize(100, rc::gen::inRange<int64_t>(0, bound)); }

// What a reader of the ledger sees: memory that carries the item's stamp.
struct Seen {
  ReaderId reader;
  TransferId item;
  std::shared_ptr<SharedSlab> memory;
};

// Drives a ledger at random and says after each step what must hold.
class Chaos {
 public:
  Chaos() : ledger_(kLimits, "chaos") {}

  void step() {
    ++now_;
    switch (below(12)) {
      case 0:
      case 1:
        return reserve();
      case 2:
      case 3:
        return publish();
      case 4:
        return cancel();
      case 5:
        if (!items_.empty()) ledger_.drop(pick(items_), now_);
        return;
      case 6:
        return admit();
      case 7:
      case 8:
        return acquire();
      case 9:
        return release();
      case 10:
        return leave();
      case 11:
        return cut_off();
    }
  }

  void check() const {
    for (const Seen& seen : held_) RC_ASSERT(stamp(*seen.memory) == seen.item.value);
    for (const Seen& seen : stopped_) RC_ASSERT(stamp(*seen.memory) == seen.item.value);
    for (const TransferId item : reserved_) RC_ASSERT(stamp(*ledger_.memory(item).memory) == item.value);
    const TransferSourceCounters counts = ledger_.counters();
    RC_ASSERT(counts.used_bytes >= 0 && counts.free_bytes >= 0);
    RC_ASSERT(counts.used_bytes + counts.free_bytes <= kLimits.bytes);
    RC_ASSERT(counts.quarantined_bytes <= counts.used_bytes);
    RC_ASSERT(counts.items <= kLimits.items);
  }

  void finish() {
    while (!reserved_.empty()) cancel();
    for (const ReaderId reader : readers_) ledger_.leave(reader);
    ledger_.expire(INT64_MAX, 0);
    const TransferSourceCounters counts = ledger_.counters();
    RC_ASSERT(counts.used_bytes == 0);
    RC_ASSERT(counts.items == 0);
    for (const Seen& seen : stopped_) RC_ASSERT(stamp(*seen.memory) == seen.item.value);
  }

 private:
  template <typename T>
  static T pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(below(static_cast<int64_t>(from.size())))];
  }
  static int64_t stamp(const SharedSlab& slab) {
    int64_t out = 0;
    std::memcpy(&out, slab.data(), sizeof out);
    return out;
  }

  void reserve() {
    const auto item = ledger_.reserve(kPage * (1 + below(8)));
    if (!item.ok()) {
      RC_ASSERT(absl::IsResourceExhausted(item.status()));
      return;
    }
    std::memcpy(ledger_.memory(*item).memory->data(), &item->value, sizeof item->value);
    reserved_.push_back(*item);
  }
  void publish() {
    if (reserved_.empty()) return;
    ledger_.publish(reserved_.back(), content(100), now_ + 1 + below(60), below(3));
    items_.push_back(reserved_.back());
    reserved_.pop_back();
  }
  void cancel() {
    if (reserved_.empty()) return;
    ledger_.cancel(reserved_.back());
    reserved_.pop_back();
  }
  void admit() {
    const ReaderId id{next_reader_++};
    const TransferLane lane = *rc::gen::element(TransferLane::kSharedMemory, TransferLane::kTcp);
    const std::string name(1, static_cast<char>('a' + below(3)));
    if (ledger_.admit(id, {name, below(20), lane}).ok()) {
      readers_.push_back(id);
      if (lane == TransferLane::kTcp) by_tcp_.push_back(id);
    }
  }
  void acquire() {
    if (items_.empty() || readers_.empty()) return;
    const ReaderId reader = pick(readers_);
    const TransferId item = pick(items_);
    const auto hold = ledger_.acquire(reader, item, now_);
    if (hold.ok()) held_.push_back({reader, item, hold->memory});
  }
  void release() {
    if (held_.empty()) return;
    const auto at = static_cast<size_t>(below(static_cast<int64_t>(held_.size())));
    RC_ASSERT(ledger_.release(held_[at].reader, held_[at].item, *rc::gen::arbitrary<bool>(), now_));
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  void leave() {
    if (readers_.empty()) return;
    const ReaderId reader = pick(readers_);
    ledger_.leave(reader);
    std::erase_if(held_, [reader](const Seen& seen) { return seen.reader == reader; });
    std::erase(readers_, reader);
  }
  // What shared memory had shown to those stays in their sight for ever.
  void cut_off() {
    std::vector<ReaderId> cut;
    if (*rc::gen::arbitrary<bool>()) {
      cut = ledger_.fence(std::string(1, static_cast<char>('a' + below(3))), below(20));
    } else {
      cut = ledger_.expire(now_, below(40));
    }
    for (const ReaderId reader : cut) {
      const bool by_tcp = std::count(by_tcp_.begin(), by_tcp_.end(), reader) > 0;
      for (const Seen& seen : held_) {
        if (seen.reader == reader && !by_tcp) stopped_.push_back(seen);
      }
      if (!by_tcp) std::erase_if(held_, [reader](const Seen& seen) { return seen.reader == reader; });
    }
  }

  TransferLedger ledger_;
  int64_t now_ = 0, next_reader_ = 1;
  std::vector<TransferId> reserved_, items_;
  std::vector<ReaderId> readers_, by_tcp_;
  std::vector<Seen> held_, stopped_;
};

TEST(TransferLedgerProperty, NothingIsWrittenThatSomebodySees) {
  EXPECT_TRUE(rc::check([] {
    Chaos chaos;
    const int64_t steps = 1 + below(300);
    for (int64_t i = 0; i < steps; ++i) {
      chaos.step();
      chaos.check();
    }
    chaos.finish();
  }));
}

}  // namespace
}  // namespace parvl
