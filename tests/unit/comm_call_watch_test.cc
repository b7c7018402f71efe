// How ranks find out together what is wrong with a call that does not end: all of it in one thread, on a clock that the
// test moves.
#include <gmock/gmock.h>

#include "parvl/comm/call_watch.h"
#include "parvl/comm/comm_site.h"
#include "parvl/comm/local/local_store.h"

namespace parvl {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Call all_reduce(int64_t count) { return {.kind = CallKind::kAllReduce, .count = count}; }

// A store that can be gone.
class FailingStore : public Store {
 public:
  FailingStore(std::unique_ptr<Store> inner, const bool& gone) : inner_(std::move(inner)), gone_(gone) {}
  absl::Status set(const std::string& key, const std::string& value) override {
    return gone_ ? failed("connection closed") : inner_->set(key, value);
  }
  absl::StatusOr<std::optional<std::string>> look(const std::string& key) override {
    if (gone_) return failed("connection closed");
    return inner_->look(key);
  }
  absl::StatusOr<std::string> get(const std::string& key, double timeout_s) override {
    return inner_->get(key, timeout_s);
  }
  absl::Status erase(const std::string& key) override { return inner_->erase(key); }
  std::string where() const override { return "the store of rank 0 at somewhere:1"; }
  bool ends_with_this_process() const override { return false; }

 private:
  std::unique_ptr<Store> inner_;
  const bool& gone_;
};

class CallWatchTest : public testing::Test {
 protected:
  static constexpr int64_t kSize = 3;
  struct Rank {
    size_t g = 0, h = 0;
    std::vector<std::string> ended;  // what its groups were ended with
    absl::Status found, stuck;
    std::string calls;
    std::unique_ptr<CallWatch> watch;  // last: it may tell of a finding while it ends
  };

  void start(CheckOptions options = {}) {
    options.clock = &clock_;
    options.beat_s = 0;
    const auto state = make_local_store_state();
    for (int64_t r = 0; r < kSize; ++r) {
      Rank& rank = ranks_[static_cast<size_t>(r)];
      options.on_finding = [&rank](const absl::Status& status, const std::string& calls) {
        rank.found = status;
        rank.calls = calls;
      };
      options.on_stuck = [&rank](const absl::Status& status) { rank.stuck = status; };
      auto store = std::make_unique<FailingStore>(make_local_store(state), store_gone_);
      rank.watch = std::make_unique<CallWatch>(r, kSize, std::move(store), options);
      const auto end = [&rank](const std::string& reason) { rank.ended.push_back(reason); };
      rank.g = rank.watch->add({"g", {0, 1, 2}}, end);
      rank.h = rank.watch->add({"h", {0, 1, 2}}, end);
    }
  }
  CallWatch& watch(size_t rank) { return *ranks_[rank].watch; }
  void call(size_t rank, const Call& what, bool wait = true) {
    const auto number = watch(rank).begin(ranks_[rank].g, what);
    ASSERT_TRUE(number.ok());
    if (wait) watch(rank).wait_begins(ranks_[rank].g, *number);
  }
  // All ranks but the stopped ones look and guard, every quarter of a second, until rank 0 has ended or so much time is
  // over. Gives the seconds that it took.
  double beat(double most_s, int64_t stopped = -1) {
    const double from = clock_.now_seconds();
    while (clock_.now_seconds() - from < most_s && watch(0).ended().ok()) {
      clock_.advance_ns(250'000'000);
      for (int64_t r = 0; r < kSize; ++r) {
        if (r == stopped) continue;
        watch(static_cast<size_t>(r)).look();
        watch(static_cast<size_t>(r)).guard();
      }
    }
    return clock_.now_seconds() - from;
  }

  ManualClock clock_;
  bool store_gone_ = false;
  Rank ranks_[kSize];
};

TEST_F(CallWatchTest, AShapeThatDiffersIsNamedWithinFiveSecondsOnAllRanks) {
  start();
  for (size_t r = 0; r < kSize; ++r) call(r, all_reduce(r == 1 ? 5 : 6));
  EXPECT_LT(beat(60), 2.5);
  beat(60);
  for (size_t r = 0; r < kSize; ++r) {
    watch(r).look();  // what rank 0 has found
    EXPECT_TRUE(absl::IsInvalidArgument(watch(r).ended()));
    EXPECT_THAT(watch(r).ended().message(), HasSubstr("group g, call 0: rank 1 called all_reduce (sum) of 5 float32"));
    EXPECT_EQ(ranks_[r].found, watch(r).ended());
    EXPECT_EQ(ranks_[r].ended.size(), 2u);  // both groups
    EXPECT_THAT(ranks_[r].calls, HasSubstr("call 0: all_reduce (sum) of"));
    EXPECT_FALSE(watch(r).begin(ranks_[r].g, all_reduce(1)).ok());
  }
}

// Rank 1 makes its next call in another group: nobody's call differs, but none can end.
TEST_F(CallWatchTest, ASkippedCallIsNamedWithinFiveSeconds) {
  start();
  call(0, all_reduce(6));
  call(2, all_reduce(6));
  const auto number = watch(1).begin(ranks_[1].h, all_reduce(7));
  watch(1).wait_begins(ranks_[1].h, *number);
  EXPECT_LT(beat(60), 2.5);
  EXPECT_THAT(watch(0).ended().message(),
              HasSubstr("ranks wait for each other: ranks 0, 2 for rank 1 in group g, call 0 (all_reduce (sum) of 6 "
                        "float32); rank 1 for ranks 0, 2 in group h, call 0 (all_reduce (sum) of 7 float32)"));
}

// A rank that computes is waited for, until the deadline; then it is named, and where it is.
TEST_F(CallWatchTest, ARankThatDoesNotComeIsNamedAfterTheDeadline) {
  start();
  call(1, all_reduce(3), /*wait=*/false);
  for (const size_t r : {0, 2}) {
    call(r, all_reduce(3), /*wait=*/false);
    call(r, all_reduce(6));
  }
  beat(599);
  EXPECT_TRUE(watch(0).ended().ok()) << watch(0).ended();
  beat(60);
  EXPECT_TRUE(absl::IsDeadlineExceeded(watch(0).ended()));
  EXPECT_THAT(watch(0).ended().message(),
              HasSubstr("group g, call 1 (all_reduce (sum) of 6 float32) of rank 0 was not done within 600 s; missing: "
                        "rank 1 is in no call; its last was group g, call 0 (all_reduce (sum) of 3 float32)"));
}

TEST_F(CallWatchTest, TheWorkOfOneRankHasNoDeadline) {
  start();
  {
    const CommSite save("save", CommSite::Wait::kLong);
    for (const size_t r : {0, 2}) call(r, all_reduce(1));
  }
  beat(1500);
  EXPECT_TRUE(watch(0).ended().ok()) << watch(0).ended();
  // But a process that is stopped is noticed, also then.
  EXPECT_LT(beat(100, /*stopped=*/1), 45);
  EXPECT_TRUE(absl::IsDeadlineExceeded(watch(0).ended()));
  EXPECT_THAT(watch(0).ended().message(),
              AllOf(HasSubstr("rank 1 has given no sign of life for 3"),
                    HasSubstr("while rank 0 waits for it in group g, call 0 (all_reduce (sum) of 1 float32 at save)")));
}

TEST_F(CallWatchTest, AStoppedRankIsNamedAsSoonAsTheOptionsSay) {
  start({.silent_s = 2});
  for (const size_t r : {0, 2}) call(r, all_reduce(1));
  EXPECT_LT(beat(100, /*stopped=*/1), 5);
  EXPECT_THAT(watch(0).ended().message(), HasSubstr("rank 1 has given no sign of life for 2 s"));
  EXPECT_THAT(ranks_[0].calls, HasSubstr("rank 1: nothing was heard of it"));
}

TEST_F(CallWatchTest, AStoreThatIsGoneIsNamed) {
  start();
  for (const size_t r : {0, 2}) call(r, all_reduce(1));
  store_gone_ = true;
  EXPECT_LT(beat(100), 35);
  EXPECT_THAT(
      watch(0).ended().message(),
      HasSubstr("the store of rank 0 at somewhere:1 is gone (connection closed), while rank 0 waits in group g"));
}

// Gloo cannot end a call: then the process has to.
TEST_F(CallWatchTest, ACallThatCannotBeEndedIsReported) {
  start();
  for (size_t r = 0; r < kSize; ++r) call(r, all_reduce(static_cast<int64_t>(r)));
  beat(60);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(ranks_[0].stuck.ok());
    clock_.advance_ns(300'000'000);
    watch(0).guard();
  }
  EXPECT_TRUE(ranks_[0].stuck.ok());
  clock_.advance_ns(300'000'000);
  watch(0).guard();
  EXPECT_EQ(ranks_[0].stuck, watch(0).ended());
  // One whose thread was freed is not.
  watch(1).look();
  watch(1).end(ranks_[1].g, 0);
  clock_.advance_ns(5'000'000'000);
  watch(1).guard();
  EXPECT_TRUE(ranks_[1].stuck.ok());
}

TEST_F(CallWatchTest, AnAbortIsHeardByTheOthersAndIsNoFinding) {
  start();
  watch(2).abort(absl::AbortedError("rank 2 has no more memory"));
  watch(2).look();
  for (size_t r = 0; r < kSize; ++r) {
    watch(r).look();
    EXPECT_EQ(watch(r).ended(), absl::AbortedError("rank 2 has no more memory"));
    EXPECT_EQ(ranks_[r].ended.size(), 2u);
    EXPECT_TRUE(ranks_[r].found.ok());
  }
}

TEST_F(CallWatchTest, ARankThatHasLeftIsNamed) {
  start();
  for (const size_t r : {0, 2}) call(r, all_reduce(6));
  ranks_[1].watch = nullptr;
  EXPECT_LT(beat(60, /*stopped=*/1), 2.5);
  EXPECT_THAT(watch(0).ended().message(), HasSubstr("rank 1 has ended without making it; rank 0 waits for it"));
}

// A failed call is explained at once, by whoever answers.
TEST_F(CallWatchTest, AFailureIsExplainedByWhatOthersCalled) {
  start();
  for (size_t r = 0; r < kSize; ++r) call(r, all_reduce(r == 1 ? 5 : 6));
  const absl::Status broken = absl::InternalError("connection closed by peer");
  watch(0).end(ranks_[0].g, 0);
  EXPECT_EQ(watch(0).explain(broken), broken);  // nobody has answered yet
  for (int i = 0; i < 2 && watch(0).ended().ok(); ++i) {
    watch(1).look();
    watch(2).look();
    EXPECT_FALSE(watch(0).explain(broken).ok());
  }
  EXPECT_THAT(watch(0).explain(broken).message(), HasSubstr("rank 1 called all_reduce (sum) of 5 float32"));
}

// Ten minutes of calls that take a while: nobody is named.
TEST_F(CallWatchTest, SlowCallsAreNoAlarm) {
  start();
  for (int i = 0; i < 20; ++i) {
    for (size_t r = 0; r < kSize; ++r) {
      call(r, all_reduce(i));
      beat(5);  // the first rank waits for the others
    }
    beat(20);  // all have come, and it takes a while
    for (size_t r = 0; r < kSize; ++r) watch(r).end(ranks_[r].g, i);
  }
  for (size_t r = 0; r < kSize; ++r) EXPECT_TRUE(watch(r).ended().ok()) << watch(r).ended();
}

}  // namespace
}  // namespace parvl
