// The log of a rank's calls, and what the logs of several ranks prove: tables, without threads or time.
#include <gmock/gmock.h>

#include "parvl/base/rng.h"
#include "parvl/comm/call_judge.h"
#include "parvl/comm/comm_site.h"

namespace parvl {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

Call all_reduce(int64_t count, DType dtype = DType::kFloat32, ReduceOp op = ReduceOp::kSum) {
  return {.kind = CallKind::kAllReduce, .dtype = dtype, .reduce = op, .count = count};
}
Call gather(int64_t count) { return {.kind = CallKind::kAllGather, .count = count}; }
Call broadcast(int64_t count, int64_t root) { return {.kind = CallKind::kBroadcast, .count = count, .peer = root}; }
Call send(int64_t count, int64_t to) { return {.kind = CallKind::kSend, .count = count, .peer = to}; }
Call receive(int64_t count, int64_t from) { return {.kind = CallKind::kReceive, .count = count, .peer = from}; }
Call all_to_all(std::vector<int64_t> sent, std::vector<int64_t> awaited) {
  Call out{.kind = CallKind::kAllToAll};
  for (const int64_t count : sent) out.count += count;
  out.sent = std::move(sent);
  out.awaited = std::move(awaited);
  return out;
}

// Ranks with a log in each of two groups: g of all, and h of all.
class World {
 public:
  explicit World(int64_t size, size_t remembered = 100) {
    std::vector<int64_t> ranks;
    for (int64_t r = 0; r < size; ++r) ranks.push_back(r);
    for (int64_t r = 0; r < size; ++r) {
      logs_.push_back({CallLog({"g", ranks}, r, remembered), CallLog({"h", ranks}, r, remembered)});
      waiting_.push_back({-1, -1});
    }
  }
  CallLog& g(int64_t rank) { return logs_[static_cast<size_t>(rank)][0]; }
  CallLog& h(int64_t rank) { return logs_[static_cast<size_t>(rank)][1]; }
  void all(const Call& call, std::string_view site = "step") {
    for (auto& logs : logs_) logs[0].begin(call, site, 0);
  }
  // The rank's last call in a group (0: g) is what it waits for.
  void wait(int64_t rank, int group = 0) {
    waiting_[static_cast<size_t>(rank)] = {group,
                                           logs_[static_cast<size_t>(rank)][static_cast<size_t>(group)].calls() - 1};
  }
  uint64_t digest() const {
    uint64_t out = 0;
    for (const auto& logs : logs_) out += logs[0].digest() + logs[1].digest();
    return out;
  }
  // As they come out of the store.
  RankReports reports(size_t calls = 100) const {
    RankReports out;
    for (size_t r = 0; r < logs_.size(); ++r) {
      RankReport report;
      report.rank = static_cast<int64_t>(r);
      for (const CallLog& log : logs_[r]) report.groups.push_back(report_of(log, calls));
      if (waiting_[r].first >= 0) {
        const CallLog& log = logs_[r][static_cast<size_t>(waiting_[r].first)];
        report.waiting = {log.group().name, *log.find(waiting_[r].second), 2};
      }
      out[report.rank] = *parse_report(to_text(report));
    }
    return out;
  }

 private:
  std::vector<std::vector<CallLog>> logs_;
  std::vector<std::pair<int, int64_t>> waiting_;
};

TEST(CommSite, PlacesNest) {
  EXPECT_EQ(CommSite::current(), "");
  const CommSite outer("backward");
  {
    const CommSite inner("layers.3", CommSite::Wait::kLong);
    EXPECT_EQ(CommSite::current(), "backward/layers.3");
    EXPECT_TRUE(CommSite::waits_long());
    const CommSite longest(std::string(500, 'x'));
    EXPECT_EQ(CommSite::current().size(), 190u);
    EXPECT_TRUE(CommSite::waits_long());
  }
  EXPECT_EQ(CommSite::current(), "backward");
  EXPECT_FALSE(CommSite::waits_long());
}

TEST(CallLog, KeepsTheLastCalls) {
  CallLog log({"g", {0, 1}}, 0, 3);
  for (int64_t i = 0; i < 7; ++i) EXPECT_EQ(log.begin(all_reduce(i), "s", i), i);
  log.end(5, 50);
  log.end(1, 99);  // forgotten
  std::vector<int64_t> counts, ended;
  for (const CallRecord& call : log.tail(10)) {
    counts.push_back(call.count);
    ended.push_back(call.ended_ns);
  }
  EXPECT_THAT(counts, ElementsAre(4, 5, 6));
  EXPECT_THAT(ended, ElementsAre(-1, 50, -1));
  EXPECT_EQ(log.tail(2).front().count, 5);
  EXPECT_EQ(log.find(3), nullptr);
  EXPECT_EQ(log.find(7), nullptr);
  EXPECT_EQ(log.find(4)->index, 4);
  EXPECT_EQ(log.collectives(), 7);
}

struct Difference {
  Call usual, other;
  std::string usual_site = "step", other_site = "step";
  std::string says;
};

// Every kind of difference is seen in the sum of the digests, and named with rank, call, shape and place.
TEST(CallJudge, NamesTheRankTheCallAndTheShapes) {
  const std::vector<Difference> table = {
      {all_reduce(6), all_reduce(5), "step", "step",
       "rank 1 called all_reduce (sum) of 5 float32 at step, ranks 0, 2 called all_reduce (sum) of 6 float32 at step"},
      {all_reduce(6), all_reduce(6, DType::kBFloat16), "step", "step", "rank 1 called all_reduce (sum) of 6 bfloat16"},
      {all_reduce(6), all_reduce(6, DType::kFloat32, ReduceOp::kMax), "step", "step",
       "rank 1 called all_reduce (max) of 6 float32"},
      {all_reduce(6), gather(6), "step", "step", "rank 1 called all_gather of 6 float32"},
      {broadcast(6, 0), broadcast(6, 2), "step", "step", "rank 1 called broadcast of 6 float32 from rank 2"},
      {all_reduce(6), all_reduce(6), "layers.3", "layers.4",
       "rank 1 called all_reduce (sum) of 6 float32 at layers.4, ranks 0, 2 called all_reduce (sum) of 6 float32 at "
       "layers.3"},
      {all_reduce(6), Call{}, "step", "step", "rank 1 called barrier at step"},
  };
  for (const Difference& difference : table) {
    World world(3);
    for (int i = 0; i < 4; ++i) world.all(all_reduce(i));
    EXPECT_EQ(world.digest(), 0u);
    EXPECT_TRUE(find_mismatch(world.reports()).ok());
    for (int64_t rank = 0; rank < 3; ++rank) {
      const bool usual = rank != 1;
      world.g(rank).begin(usual ? difference.usual : difference.other,
                          usual ? difference.usual_site : difference.other_site, 0);
    }
    world.all(all_reduce(9));  // what follows changes nothing
    EXPECT_NE(world.digest(), 0u);
    const absl::Status status = find_mismatch(world.reports());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("group g, call 4: "), HasSubstr(difference.says)));
  }
}

// A call too many or too few, and two in the other order.
TEST(CallJudge, SkippedAndReorderedCallsAreNamed) {
  World skipped(3), reordered(3);
  for (int64_t rank = 0; rank < 3; ++rank) {
    if (rank != 2) skipped.g(rank).begin(all_reduce(1), "a", 0);
    skipped.g(rank).begin(gather(2), "b", 0);
    const bool swap = rank == 0;
    reordered.g(rank).begin(swap ? gather(2) : all_reduce(1), swap ? "b" : "a", 0);
    reordered.g(rank).begin(swap ? all_reduce(1) : gather(2), swap ? "a" : "b", 0);
  }
  EXPECT_NE(skipped.digest(), 0u);
  EXPECT_NE(reordered.digest(), 0u);
  EXPECT_THAT(find_mismatch(skipped.reports()).message(),
              HasSubstr("call 0: rank 2 called all_gather of 2 float32 at b, ranks 0, 1 called all_reduce (sum) of 1"));
  EXPECT_THAT(find_mismatch(reordered.reports()).message(),
              HasSubstr("call 0: rank 0 called all_gather of 2 float32 at b, ranks 1, 2 called all_reduce (sum) of 1"));
  // The last one is skipped: no call differs, but the counts do.
  World last(2);
  last.all(all_reduce(1));
  last.g(0).begin(all_reduce(2), "end", 0);
  EXPECT_NE(last.digest(), 0u);
  EXPECT_TRUE(find_mismatch(last.reports()).ok());
  EXPECT_THAT(find_difference(last.reports()).message(),
              HasSubstr("group g, call 1 (all_reduce (sum) of 2 float32 at end): rank 1 did not make it"));
}

TEST(CallJudge, WhatIsForgottenIsStillSeen) {
  World world(2, /*remembered=*/4);
  for (int64_t rank = 0; rank < 2; ++rank) world.g(rank).begin(all_reduce(rank), "early", 0);
  for (int i = 0; i < 10; ++i) world.all(all_reduce(3));
  EXPECT_THAT(find_mismatch(world.reports()).message(),
              HasSubstr("group g: the calls of rank 1 and rank 0 differ somewhere before call 7"));
}

TEST(CallJudge, MessagesArePairedByRankAndOrder) {
  World world(3);
  world.g(0).begin(send(5, 1), "forward", 0);
  world.g(0).begin(send(6, 2), "forward", 0);
  world.g(1).begin(receive(5, 0), "elsewhere", 0);  // each side has a place of its own
  EXPECT_NE(world.digest(), 0u);
  EXPECT_TRUE(find_mismatch(world.reports()).ok());
  EXPECT_THAT(find_difference(world.reports()).message(),
              HasSubstr("group g: rank 0 has sent 1 messages to rank 2, which has awaited 0"));
  world.g(2).begin(receive(6, 0), "", 0);
  EXPECT_EQ(world.digest(), 0u);
  world.g(2).begin(send(7, 1), "back", 0);
  world.g(1).begin(receive(8, 2), "", 0);
  EXPECT_NE(world.digest(), 0u);
  EXPECT_THAT(find_mismatch(world.reports()).message(),
              HasSubstr("group g, message 0 from rank 2 to rank 1: rank 2 called send of 7 float32 to rank 1 at back, "
                        "rank 1 receive of 8 float32 from rank 2"));
  // To another rank than the one that awaits it.
  World other(3);
  other.g(0).begin(send(5, 1), "", 0);
  other.g(2).begin(receive(5, 0), "", 0);
  EXPECT_NE(other.digest(), 0u);
  EXPECT_THAT(find_difference(other.reports()).message(), HasSubstr("rank 0 has sent 1 messages to rank 1"));
}

TEST(CallJudge, PartsOfAnAllToAllMustFit) {
  World world(2);
  world.g(0).begin(all_to_all({1, 2}, {1, 3}), "", 0);
  world.g(1).begin(all_to_all({3, 4}, {2, 4}), "", 0);
  EXPECT_EQ(world.digest(), 0u);
  EXPECT_TRUE(find_mismatch(world.reports()).ok());
  world.g(0).begin(all_to_all({1, 2}, {1, 3}), "", 0);
  world.g(1).begin(all_to_all({2, 4}, {2, 4}), "", 0);
  EXPECT_NE(world.digest(), 0u);
  EXPECT_THAT(find_mismatch(world.reports()).message(),
              HasSubstr("call 1: in all_to_all of 6 float32, rank 1 sends 2 values to rank 0, which awaits 3"));
}

// Any sequence that all make sums to nothing; one that is changed anywhere on one rank does not, and is found.
TEST(CallJudge, AnyChangeOfAnySequenceIsFound) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Rng rng(seed);
    const auto below = [&](uint64_t bound) { return static_cast<int64_t>(rng.below(bound)); };
    const int64_t size = 2 + below(4), length = 2 + below(40);
    const int64_t culprit = below(static_cast<uint64_t>(size)), where = below(static_cast<uint64_t>(length - 1));
    const int64_t how = below(3);
    std::vector<Call> calls;
    for (int64_t i = 0; i < length; ++i) {
      calls.push_back(below(2) == 0 ? all_reduce(i) : broadcast(i, below(static_cast<uint64_t>(size))));
    }
    World good(size), bad(size);
    for (int64_t rank = 0; rank < size; ++rank) {
      std::vector<Call> mine = calls;
      for (const Call& call : mine) good.g(rank).begin(call, "s", 0);
      const size_t at = static_cast<size_t>(where);
      if (rank == culprit && how == 0) mine.erase(mine.begin() + where);
      if (rank == culprit && how == 1) std::swap(mine[at], mine[at + 1]);
      if (rank == culprit && how == 2) mine[at].count += 1;
      for (const Call& call : mine) bad.g(rank).begin(call, "s", 0);
    }
    ASSERT_EQ(good.digest(), 0u) << seed;
    ASSERT_TRUE(find_mismatch(good.reports()).ok()) << seed;
    ASSERT_NE(bad.digest(), 0u) << seed;
    const std::string found(find_difference(bad.reports()).message());
    ASSERT_THAT(found, HasSubstr(absl::StrCat("call ", where))) << seed;
    ASSERT_THAT(found, HasSubstr(absl::StrCat("rank ", culprit))) << seed;
  }
}

// Rank 1 has left out a call of g and waits in h; the others wait for it in g.
TEST(CallJudge, RanksThatWaitInACircleAreFound) {
  World world(3);
  for (const int64_t rank : {0, 2}) {
    world.g(rank).begin(all_reduce(6), "mlp", 0);
    world.wait(rank);
  }
  RankReports reports = world.reports();
  EXPECT_TRUE(find_deadlock(reports).ok());  // rank 1 may be computing
  EXPECT_THAT(awaited_ranks(reports.at(0), reports), ElementsAre(1));
  world.h(1).begin(gather(3), "loss", 0);
  world.wait(1, 1);
  reports = world.reports();
  EXPECT_TRUE(find_mismatch(reports).ok());
  const absl::Status status = find_deadlock(reports);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(),
              HasSubstr("ranks wait for each other: ranks 0, 2 for rank 1 in group g, call 0 (all_reduce (sum) of 6 "
                        "float32 at mlp); rank 1 for ranks 0, 2 in group h, call 0 (all_gather of 3 float32 at loss)"));
  // An older report of rank 1, from before its wait, proves nothing.
  reports.at(1).waiting.reset();
  EXPECT_TRUE(find_deadlock(reports).ok());
  // Nor does a wait in which rank 1 is awaited by one that rank 1 does not wait for.
  reports.erase(1);
  EXPECT_TRUE(find_deadlock(reports).ok());
}

// Both wait in one call of g, which does not end since a call of h, which only a GPU would wait for, hangs before it.
TEST(CallJudge, RanksThatStandInOneCallShowWhatTheyLeftOut) {
  World world(2);
  world.h(0).begin(all_reduce(6), "mlp", 0);
  world.all({.kind = CallKind::kBarrier}, "figures");
  world.wait(0);
  EXPECT_TRUE(find_standstill(world.reports(), 2).ok());  // rank 1 may be computing
  world.wait(1);
  EXPECT_TRUE(find_mismatch(world.reports()).ok());
  EXPECT_TRUE(find_deadlock(world.reports()).ok());
  const absl::Status status = find_standstill(world.reports(), 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(),
              HasSubstr("group h, call 0 (all_reduce (sum) of 6 float32 at mlp): rank 1 did not make it"));
  EXPECT_TRUE(find_standstill(world.reports(), 3).ok());  // of a third nothing is known
  world.h(1).begin(all_reduce(6), "mlp", 0);
  EXPECT_TRUE(find_standstill(world.reports(), 2).ok());
  world.h(0).begin(send(4, 1), "layer", 0);
  EXPECT_THAT(find_standstill(world.reports(), 2).message(),
              HasSubstr("group h: rank 0 has sent 1 messages to rank 1, which has awaited 0"));
  world.g(1).begin({.kind = CallKind::kBarrier}, "figures", 0);
  world.wait(1);  // in the next: what the other has called until there is not known
  EXPECT_TRUE(find_standstill(world.reports(), 2).ok());
}

TEST(CallJudge, SendsAndReceivesWaitForTheirOtherSide) {
  World world(2);
  world.g(0).begin(send(1, 1), "", 0);
  world.wait(0);
  world.g(1).begin(send(1, 0), "", 0);
  world.wait(1);
  EXPECT_THAT(find_deadlock(world.reports()).message(), HasSubstr("group g, message 0 (send of 1 float32 to rank 1)"));
  world.g(1).begin(receive(1, 0), "", 0);  // awaited before it waits for its own send
  EXPECT_TRUE(find_deadlock(world.reports()).ok());
}

// With some backends the root of a broadcast is done before anybody has come; not with all.
TEST(CallJudge, ABroadcastWaitsForAll) {
  World world(3);
  for (const int64_t rank : {0, 1}) {
    world.g(rank).begin(broadcast(4, 0), "", 0);
    world.wait(rank);
  }
  const RankReports reports = world.reports();
  EXPECT_THAT(awaited_ranks(reports.at(0), reports), ElementsAre(2));
  EXPECT_THAT(awaited_ranks(reports.at(1), reports), ElementsAre(2));
}

TEST(CallJudge, ARankThatHasLeftIsNotWaitedFor) {
  World world(2);
  world.all(all_reduce(1));
  world.g(0).begin(all_reduce(2), "eval", 0);
  world.wait(0);
  RankReports reports = world.reports();
  reports.at(1).has_left = true;
  EXPECT_THAT(find_deadlock(reports).message(),
              HasSubstr("group g, call 1 (all_reduce (sum) of 2 float32 at eval): rank 1 has ended without making it"));
  // It has made the call, and left since.
  world.g(1).begin(all_reduce(2), "eval", 0);
  reports = world.reports();
  reports.at(1).has_left = true;
  EXPECT_TRUE(find_deadlock(reports).ok());
}

TEST(CallJudge, PositionsAreForPeople) {
  World world(3);
  world.g(0).begin(all_reduce(6), "mlp", 5);
  world.wait(0);
  world.h(1).begin(gather(3), "", 7);
  RankReports reports = world.reports();
  EXPECT_EQ(position(0, reports), "rank 0 waits since 2.0 s in group g, call 0 (all_reduce (sum) of 6 float32 at mlp)");
  EXPECT_EQ(position(1, reports), "rank 1 is in no call; its last was group h, call 0 (all_gather of 3 float32)");
  EXPECT_EQ(position(2, reports), "rank 2 has made no call yet");
  EXPECT_EQ(position(3, reports), "rank 3: nothing was heard of it");
  reports.at(2).has_left = true;
  EXPECT_EQ(position(2, reports), "rank 2 has ended");
}

TEST(CallReport, TextThatIsNoReportIsRefused) {
  EXPECT_FALSE(parse_report("").ok());
  EXPECT_FALSE(parse_report("{}").ok());
  EXPECT_FALSE(parse_report(R"({"rank": 0, "number": 1, "left": false, "groups": [1]})").ok());
}

}  // namespace
}  // namespace parvl
