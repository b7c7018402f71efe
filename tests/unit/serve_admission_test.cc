// Who may come in and whose turn it is, without a server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "parvl/base/rng.h"
#include "parvl/serve/admission.h"

namespace parvl {
namespace {

using testing::ElementsAre;

Admission::Limits limits_of(size_t waiting, size_t running, size_t tokens = 0) {
  Admission::Limits limits;
  limits.waiting.fill(waiting);
  limits.running = running;
  limits.tokens = tokens;
  return limits;
}

// A line with turns written down in order.
struct Line {
  explicit Line(const Admission::Limits& limits) : admission(limits, clock) {}
  std::unique_ptr<Admission::Ticket> enter(int id, const Admission::Entry& entry = {}) {
    return admission.enter(entry, [this, id] { turns.push_back(id); });
  }
  void pass(double seconds) { clock.advance_ns(static_cast<int64_t>(seconds * 1e9)); }
  ManualClock clock;
  Admission admission;
  std::vector<int> turns;
};

TEST(Admission, WhoIsNotReadyHasAPlaceButNoTurn) {
  Line line(limits_of(2, 1));
  auto a = line.enter(1, {.ready = false}), b = line.enter(2, {.ready = false}), c = line.enter(3);
  EXPECT_THAT(line.turns, ElementsAre(3));
  EXPECT_EQ(line.enter(4, {.ready = false}), nullptr);  // two wait already
  auto d = line.enter(5);
  EXPECT_EQ(d, nullptr);
  b->set_ready();
  EXPECT_THAT(line.turns, ElementsAre(3, 2));  // made ready while 3 runs
  a->set_ready();
  a->set_ready();
  c.reset();
  EXPECT_THAT(line.turns, ElementsAre(3, 2, 1));
  a.reset();
  b.reset();
  EXPECT_EQ(line.admission.size(), 0u);
  auto e = line.enter(6, {.ready = false});
  e.reset();  // one that leaves before it is ready
  auto f = line.enter(7), g = line.enter(8), h = line.enter(9, {.ready = false});
  EXPECT_THAT(line.turns, ElementsAre(3, 2, 1, 7, 8));
  EXPECT_NE(h, nullptr);
}

TEST(Admission, CreditsGoByArrivalAndPlacesComeBack) {
  Line line(limits_of(2, 1));
  auto a = line.enter(1), b = line.enter(2), c = line.enter(3);
  EXPECT_EQ(line.enter(4), nullptr);
  EXPECT_THAT(line.turns, ElementsAre(1, 2));  // the one that runs, and the one that is made ready
  EXPECT_TRUE(a->has_credit());
  EXPECT_FALSE(c->has_credit());
  b.reset();
  EXPECT_THAT(line.turns, ElementsAre(1, 2, 3));
  auto d = line.enter(5);
  c.reset();  // before it was done
  EXPECT_THAT(line.turns, ElementsAre(1, 2, 3, 5));
  EXPECT_EQ(line.admission.size(), 2u);
}

TEST(Admission, WithoutAQueueOnlyWhatRunsComesIn) {
  Line line(limits_of(0, 1));
  auto a = line.enter(1);
  EXPECT_EQ(line.enter(2), nullptr);
  a.reset();
  EXPECT_NE(line.enter(3), nullptr);
}

TEST(Admission, BeforeTheModelIsThereNobodyComesIn) {
  Line line({});
  EXPECT_EQ(line.enter(1), nullptr);
}

// The bound of one kind: what it lets in, and that every other kind still has all its places.
TEST(Admission, EachKindHasItsOwnPlaces) {
  for (size_t kind = 0; kind < kQueueNames.size(); ++kind) {
    SCOPED_TRACE(kQueueNames[kind]);
    Line line(limits_of(3, 2));
    std::vector<std::unique_ptr<Admission::Ticket>> held;
    const auto fill = [&](QueueKind which) {
      size_t count = 0;
      while (auto ticket = line.enter(0, {1, 0, which})) {
        held.push_back(std::move(ticket));
        ++count;
      }
      return count;
    };
    const auto full = static_cast<QueueKind>(kind);
    EXPECT_EQ(fill(full), 5u);  // two run, three wait
    EXPECT_EQ(line.admission.waiting(full), 3u);
    for (size_t other = 0; other < kQueueNames.size(); ++other) {
      if (other == kind) continue;
      EXPECT_EQ(line.admission.waiting(static_cast<QueueKind>(other)), 0u);
      EXPECT_EQ(fill(static_cast<QueueKind>(other)), 3u);
    }
  }
}

TEST(Admission, ALowerPriorityNumberGoesFirst) {
  Line line(limits_of(10, 1));
  auto running = line.enter(0), ready = line.enter(1), last = line.enter(2, {1, 5}), first = line.enter(3, {1, -5}),
       next = line.enter(4, {1, -5, QueueKind::kImage});
  running.reset();
  ready.reset();
  next.reset();
  first.reset();
  EXPECT_THAT(line.turns, ElementsAre(0, 1, 4, 3, 2));  // 4 is the only image, and two texts had their turns
}

TEST(Admission, NobodyIsPassedForEver) {
  Line line(limits_of(1000, 1));
  auto held = line.enter(0), running = line.enter(0), patient = line.enter(-1, {1, 1});
  int passed = 0;
  while (!patient->has_credit() && passed < 1000) {
    auto next = line.enter(++passed);
    running = std::move(next);
  }
  EXPECT_EQ(passed, Admission::kMaxPassed + 1);  // the last one came while the patient one's turn was there
}

TEST(Admission, WeightsTakeCreditsAndPlaces) {
  Line line(limits_of(2, 2));
  auto heavy = line.enter(1, {3, 0});
  auto next = line.enter(2, {5, 0});  // there was room for one, and it cannot be cut
  EXPECT_THAT(line.turns, ElementsAre(1));
  EXPECT_EQ(line.admission.size(), 8u);
  EXPECT_EQ(line.admission.waiting(QueueKind::kText), 6u);
  EXPECT_EQ(line.enter(3), nullptr);
  heavy.reset();
  EXPECT_THAT(line.turns, ElementsAre(1, 2));
  next.reset();
  EXPECT_EQ(line.admission.size(), 0u);
}

TEST(Admission, TokensOfPreparedRequestsAreBounded) {
  Line line(limits_of(10, 4, /*tokens=*/100));
  auto a = line.enter(1), b = line.enter(2), c = line.enter(3);
  EXPECT_TRUE(a->take_tokens(500));  // the first one always may
  EXPECT_FALSE(b->take_tokens(1));
  a.reset();
  EXPECT_TRUE(b->take_tokens(60));
  EXPECT_FALSE(c->take_tokens(41));
  EXPECT_TRUE(c->take_tokens(40));
  b.reset();
  c.reset();
  EXPECT_EQ(line.admission.tokens(), 0u);
}

TEST(Admission, RetryAfterFollowsThePace) {
  Line line(limits_of(20, 1));
  EXPECT_EQ(line.admission.retry_after_s(), 1);  // nothing is known yet
  std::vector<std::unique_ptr<Admission::Ticket>> held;
  for (int i = 0; i < 11; ++i) held.push_back(line.enter(i));
  line.pass(3);
  held.erase(held.begin());  // the first one took 3 s; nine wait
  EXPECT_EQ(line.admission.retry_after_s(), 27);
  for (int i = 0; i < 5; ++i) {
    line.pass(0.5);
    held.erase(held.begin());
  }
  const int64_t later = line.admission.retry_after_s();  // four wait, and it goes faster now
  EXPECT_GE(later, 4 * 0.5);
  EXPECT_LT(later, 4 * 3);
  held.resize(1);
  EXPECT_EQ(line.admission.retry_after_s(), 1);
  // A pause in which nobody waited is no sign of a slow server.
  line.pass(1000);
  held.clear();
  for (int i = 0; i < 4; ++i) held.push_back(line.enter(i));
  EXPECT_LT(line.admission.retry_after_s(), 10);
  line.pass(1e6);
  held.erase(held.begin());
  EXPECT_EQ(line.admission.retry_after_s(), 600);  // at most
}

// Random comings and goings: the counts add up at every moment, no bound is passed, and everybody who stays gets a turn
// exactly once.
TEST(Admission, SurvivesRandomLoads) {
  for (uint64_t seed = 1; seed <= 300 && !HasFailure(); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Rng rng(seed);
    const auto limits = limits_of(rng.below(6), 1 + rng.below(4));
    Line line(limits);
    struct Held {
      std::unique_ptr<Admission::Ticket> ticket;
      Admission::Entry entry;
    };
    std::map<int, Held> held;
    for (int id = 0; id < 200; ++id) {
      const Admission::Entry entry{1 + rng.below(3), static_cast<int>(rng.below(3)),
                                   static_cast<QueueKind>(rng.below(kQueueNames.size()))};
      const size_t before = line.admission.waiting(entry.kind);
      if (auto ticket = line.enter(id, entry)) {
        held[id] = {std::move(ticket), entry};
      } else {
        EXPECT_GE(before, limits.waiting[0]);
      }
      while (!held.empty() && rng.below(2) == 0) {
        held.erase(std::next(held.begin(), static_cast<int64_t>(rng.below(held.size()))));
      }
      size_t size = 0, credited = 0, waiting = 0;
      for (const auto& [_, one] : held) {
        size += one.entry.weight;
        if (one.ticket->has_credit()) credited += one.entry.weight;
      }
      for (size_t kind = 0; kind < kQueueNames.size(); ++kind) {
        const size_t of_kind = line.admission.waiting(static_cast<QueueKind>(kind));
        EXPECT_LE(of_kind, limits.waiting[kind] + 2);  // the last one may be heavier than what was left
        waiting += of_kind;
      }
      EXPECT_EQ(line.admission.size(), size);
      EXPECT_EQ(line.admission.in_line(), size);
      EXPECT_EQ(waiting, size - std::min(size, std::min(credited, limits.running)));
      EXPECT_EQ(size > 0, credited > 0);
    }
    while (!held.empty()) {
      const auto turn =
          std::find_if(held.begin(), held.end(), [](const auto& h) { return h.second.ticket->has_credit(); });
      ASSERT_NE(turn, held.end()) << "nobody's turn comes";
      held.erase(turn);
    }
    std::map<int, int> turns;
    for (const int id : line.turns) EXPECT_EQ(++turns[id], 1);
    EXPECT_EQ(line.admission.size(), 0u);
  }
}

}  // namespace
}  // namespace parvl
