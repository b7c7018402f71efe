#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <array>
#include <map>
#include <vector>

#include "parvl/elastic/modality_queue.h"

namespace parvl {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using Entry = ModalityQueue::Entry;
using Key = ModalityQueue::Key;

constexpr int kMaxPassed = 16;
constexpr QueueKind kText = QueueKind::kText, kImage = QueueKind::kImage, kVideo = QueueKind::kVideo;

std::vector<Key> all_turns(ModalityQueue& queue) {
  std::vector<Key> out;
  while (const auto key = queue.pop()) out.push_back(*key);
  return out;
}

struct Case {
  const char* name;
  std::vector<Entry> entries;  // in the order of arrival, with keys from 0
  std::vector<Key> turns;
};

TEST(ModalityQueue, WhoseTurnItIs) {
  const Case cases[] = {
      {"nobody", {}, {}},
      {"the first to come", {{kText}, {kText}, {kText}}, {0, 1, 2}},
      {"a lower priority number", {{kText, 1, 1}, {kText, 1, 0}, {kText, 1, -1}}, {2, 1, 0}},
      {"priority over all classes", {{kText, 1, 1}, {kImage, 1, 0}}, {1, 0}},
      {"classes in turns", {{kImage}, {kImage}, {kImage}, {kText}, {kText}}, {0, 3, 1, 4, 2}},
      {"by weight", {{kImage, 3}, {kImage, 3}, {kText}, {kText}, {kText}, {kText}}, {0, 2, 3, 4, 1, 5}},
      {"the earliest deadline in a class",
       {{kText, 1, 0, 9}, {kText, 1, 0, 5}, {kText}, {kText, 1, 0, 7}},
       {1, 3, 0, 2}},
      {"no deadline over another class", {{kImage, 1, 0, 9}, {kText, 1, 0, 5}}, {0, 1}},
      {"nobody who is not ready", {{kText, 1, 0, 1, false}, {kText}}, {1}},
  };
  for (const Case& c : cases) {
    ModalityQueue queue(kMaxPassed);
    for (const Entry& entry : c.entries) queue.push(entry);
    EXPECT_THAT(all_turns(queue), ElementsAreArray(c.turns)) << c.name;
  }
}

TEST(ModalityQueue, SharesAreKept) {
  ModalityQueue queue(1'000'000, {3, 1, 1, 1, 1});
  std::map<Key, QueueKind> kinds;
  for (int i = 0; i < 400; ++i) {
    for (const QueueKind kind : {kText, kImage}) kinds[queue.push({kind})] = kind;
  }
  int texts = 0;
  for (int i = 0; i < 400; ++i) texts += kinds.at(*queue.pop()) == kText ? 1 : 0;
  EXPECT_EQ(texts, 300);
}

TEST(ModalityQueue, WhoWasAwayHasSavedNothingUp) {
  ModalityQueue queue(1'000'000);
  for (int i = 0; i < 100; ++i) {
    queue.push({kText});
    queue.pop();
  }
  for (int i = 0; i < 3; ++i) queue.push({kImage});  // 100..102
  for (int i = 0; i < 3; ++i) queue.push({kText});   // 103..105
  EXPECT_THAT(all_turns(queue), ElementsAre(100, 101, 103, 102, 104, 105));
}

TEST(ModalityQueue, WhoLeavesOrGetsReadyChangesTheLine) {
  ModalityQueue queue(kMaxPassed);
  const Key a = queue.push({kText, 2}), b = queue.push({kText, 1, 0, 1, false});
  EXPECT_EQ(queue.weight(kText), 3u);
  queue.erase(a);
  EXPECT_EQ(queue.weight(kText), 1u);
  EXPECT_EQ(queue.pop(), std::nullopt);
  queue.set_ready(b);
  EXPECT_EQ(queue.pop(), b);
  EXPECT_TRUE(queue.empty());
}

// Whatever comes and goes: each turn is of one who is ready and waits, none is passed more than the bound says while
// it is ready, and all that are ready get a turn in the end.
RC_GTEST_PROP(ModalityQueueProperty, NobodyIsForgotten, ()) {
  constexpr int kBound = 5;
  ModalityQueue queue(kBound);
  struct Known {
    Entry entry;
    int passed = 0;
  };
  std::map<Key, Known> waiting;
  const auto take = [&] {
    const auto key = queue.pop();
    const bool any = std::any_of(waiting.begin(), waiting.end(), [](const auto& w) { return w.second.entry.ready; });
    RC_ASSERT(key.has_value() == any);
    if (!key.has_value()) return false;
    RC_ASSERT(waiting.at(*key).entry.ready);
    const int turn_passed = waiting.at(*key).passed;
    for (auto& [other, known] : waiting) {
      if (other >= *key) break;
      ++known.passed;
      // Those that were passed as often go first, by arrival; only one of them can go at a time.
      if (known.entry.ready) RC_ASSERT(known.passed <= kBound || turn_passed >= kBound);
    }
    waiting.erase(*key);
    return true;
  };
  const int steps = *rc::gen::inRange(0, 60);
  for (int i = 0; i < steps; ++i) {
    const int dice = *rc::gen::inRange(0, 6);
    if (dice < 3) {
      Entry entry;
      entry.kind = *rc::gen::element(kText, kImage, kVideo);
      entry.weight = *rc::gen::inRange<size_t>(1, 4);
      entry.priority = *rc::gen::inRange(0, 3);
      entry.deadline_s = *rc::gen::inRange(0, 10);
      entry.ready = *rc::gen::inRange(0, 4) > 0;
      waiting[queue.push(entry)] = {entry};
    } else if (dice == 3 && !waiting.empty()) {
      const auto which = std::next(waiting.begin(), *rc::gen::inRange<int>(0, static_cast<int>(waiting.size())));
      queue.erase(which->first);
      waiting.erase(which);
    } else if (dice == 4 && !waiting.empty()) {
      const auto which = std::next(waiting.begin(), *rc::gen::inRange<int>(0, static_cast<int>(waiting.size())));
      queue.set_ready(which->first);
      which->second.entry.ready = true;
    } else {
      take();
    }
    size_t images = 0;
    for (const auto& [_, known] : waiting) images += known.entry.kind == kImage ? known.entry.weight : 0;
    RC_ASSERT(queue.size() == waiting.size() && queue.weight(kImage) == images);
  }
  for (auto& [key, known] : waiting) {
    queue.set_ready(key);
    known.entry.ready = true;
  }
  while (take()) {
  }
  RC_ASSERT(waiting.empty() && queue.empty());
}

}  // namespace
}  // namespace parvl
