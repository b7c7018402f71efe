// Checked groups among threads: results are the bare group's, and a rank that does something else is named, whatever
// the call and the difference.
#include <gmock/gmock.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "parvl/base/rng.h"
#include "parvl/comm/comm_site.h"
#include "tests/unit/comm_fixture.h"

namespace parvl {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

enum class Do { kAllReduce, kMax, kAllGather, kReduceScatter, kBroadcast, kAllToAll, kBarrier, kMessage };
constexpr Do kAll[] = {Do::kAllReduce, Do::kMax,      Do::kAllGather, Do::kReduceScatter,
                       Do::kBroadcast, Do::kAllToAll, Do::kBarrier,   Do::kMessage};

// A call as all ranks make it; a message goes from rank `root` to the next.
struct Step {
  Do what = Do::kBarrier;
  int64_t count = 1;  // of the smaller side
  int64_t root = 0;
  DType dtype = DType::kFloat32;
  std::string site = "step";
};

absl::Status make(ProcessGroup& group, const Step& step) {
  const CommSite site(step.site);
  const int64_t size = group.size(), rank = group.rank();
  std::vector<double> small(static_cast<size_t>(step.count)), large(static_cast<size_t>(step.count * size));
  const Buffer part{small.data(), step.count, step.dtype}, whole{large.data(), step.count * size, step.dtype};
  switch (step.what) {
    case Do::kAllReduce:
      return group.all_reduce(part, ReduceOp::kSum)->wait();
    case Do::kMax:
      return group.all_reduce(part, ReduceOp::kMax)->wait();
    case Do::kAllGather:
      return group.all_gather(part, whole)->wait();
    case Do::kReduceScatter:
      return group.reduce_scatter(whole, part)->wait();
    case Do::kBroadcast:
      return group.broadcast(part, step.root)->wait();
    case Do::kAllToAll: {
      std::vector<double> other(large.size());
      const std::vector<int64_t> counts(static_cast<size_t>(size), step.count);
      return group.all_to_all(whole, counts, {other.data(), whole.count, step.dtype}, counts)->wait();
    }
    case Do::kBarrier:
      return group.barrier()->wait();
    case Do::kMessage:
      if (rank == step.root) return group.send(part, (rank + 1) % size)->wait();
      if (rank == (step.root + 1) % size) return group.receive(part, step.root)->wait();
  }
  return absl::OkStatus();
}

// What each rank's calls end with: the first error, or OK.
std::vector<absl::Status> run_steps(int64_t size, const CheckOptions& options,
                                    const std::function<std::vector<Step>(int64_t rank)>& steps_of,
                                    bool compare = true) {
  std::vector<absl::Status> out(static_cast<size_t>(size));
  run_checked_ranks(size, options, [&](CheckedRank rank) {
    absl::Status& status = out[static_cast<size_t>(rank.group.rank())];
    for (const Step& step : steps_of(rank.group.rank())) {
      status = make(rank.group, step);
      if (!status.ok()) return;
    }
    if (compare) status = rank.communicator.compare(rank.group);
  });
  return out;
}

// What was found, or that the group was ended because of it: how soon a rank hears of the finding is up to the machine.
bool is_finding(const absl::Status& status) {
  return absl::IsInvalidArgument(status) ||
         (absl::IsAborted(status) && status.message().find("group g was ended: ") != absl::string_view::npos);
}

TEST(CheckedGroup, ResultsAreThoseOfTheGroupBelow) {
  for (const bool full : {false, true}) {
    CheckOptions options = quick_checks();
    options.full = full;
    run_checked_ranks(3, options, [](CheckedRank rank) {
      ProcessGroup& group = rank.group;
      EXPECT_EQ(group.name(), "g");
      EXPECT_EQ(group.size(), 3);
      double mine = static_cast<double>(group.rank() + 1), sum = mine, all[3] = {}, highest = mine, root = mine;
      ASSERT_TRUE(group.all_reduce({&sum, 1, DType::kFloat64}, ReduceOp::kSum)->wait().ok());
      ASSERT_TRUE(group.all_reduce({&highest, 1, DType::kFloat64}, ReduceOp::kMax)->wait().ok());
      ASSERT_TRUE(group.all_gather({&mine, 1, DType::kFloat64}, {all, 3, DType::kFloat64})->wait().ok());
      ASSERT_TRUE(group.broadcast({&root, 1, DType::kFloat64}, 1)->wait().ok());
      EXPECT_EQ(sum, 6);
      EXPECT_EQ(highest, 3);
      EXPECT_EQ(all[2], 3);
      EXPECT_EQ(root, 2);
      double part = 0;
      ASSERT_TRUE(group.reduce_scatter({all, 3, DType::kFloat64}, {&part, 1, DType::kFloat64})->wait().ok());
      EXPECT_EQ(part, 3 * mine);
      double turned[3] = {}, given[3] = {10 * mine, 20 * mine, 30 * mine};
      const std::vector<int64_t> ones = {1, 1, 1};
      ASSERT_TRUE(group.all_to_all({given, 3, DType::kFloat64}, ones, {turned, 3, DType::kFloat64}, ones)->wait().ok());
      EXPECT_EQ(turned[2], 30 * mine);
      // Messages around the ring, all under way together.
      double came = 0;
      const auto out = group.send({&mine, 1, DType::kFloat64}, (group.rank() + 1) % 3);
      const auto in = group.receive({&came, 1, DType::kFloat64}, (group.rank() + 2) % 3);
      ASSERT_TRUE(in->wait().ok());
      ASSERT_TRUE(out->wait().ok());
      EXPECT_EQ(came, static_cast<double>((group.rank() + 2) % 3 + 1));
      EXPECT_TRUE(rank.communicator.compare(group).ok());
    });
  }
}

enum class Change { kSkip, kReorder, kShape, kDtype, kRoot, kSite };

// Each call, changed in each way on one rank of three: all ranks hear of it, and the one that changed is named.
class MutationTest : public testing::TestWithParam<std::tuple<Do, Change, bool>> {};

TEST_P(MutationTest, TheCulpritIsNamedWithItsCall) {
  const auto [what, change, full] = GetParam();
  const int64_t culprit = 1;
  // Before and after, other calls; rank 1 takes part in the message, as the one that sends.
  const Step usual{what, 6, 1, DType::kFloat32, "mlp"}, next{Do::kAllGather, 2, 0, DType::kFloat64, "loss"};
  const auto steps_of = [&, change = change](int64_t rank) {
    std::vector<Step> steps = {{Do::kAllReduce, 3}, usual, next, {Do::kAllReduce, 4}};
    if (rank != culprit) return steps;
    Step& mine = steps[1];
    if (change == Change::kSkip) steps.erase(steps.begin() + 1);
    if (change == Change::kReorder) std::swap(steps[1], steps[2]);
    if (change == Change::kShape) mine.count = 5;
    if (change == Change::kDtype) mine.dtype = DType::kFloat64;
    if (change == Change::kRoot) mine.root = 0;
    if (change == Change::kSite) mine.site = "attention";
    return steps;
  };
  // A barrier has no shape; only a broadcast and a message have a root; a message's place is each side's own.
  const bool sizeless = what == Do::kBarrier && (change == Change::kShape || change == Change::kDtype);
  const bool rootless = change == Change::kRoot && what != Do::kBroadcast && what != Do::kMessage;
  if (sizeless || rootless || (what == Do::kMessage && change == Change::kSite)) return;
  CheckOptions options = quick_checks();
  options.full = full;
  for (const absl::Status& status : run_steps(3, options, steps_of)) {
    ASSERT_TRUE(is_finding(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
    EXPECT_THAT(std::string(status.message()),
                AnyOf(HasSubstr("of 6 float32"), HasSubstr("of 18 float32"), HasSubstr("barrier"),
                      HasSubstr("of 2 float64"), HasSubstr("messages")));
    if (what != Do::kMessage && what != Do::kAllToAll) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("group g, call 1: rank 1 called"));
    }
    if (change == Change::kShape && what == Do::kAllReduce) {
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("rank 1 called all_reduce (sum) of 5 float32 at mlp, ranks 0, 2 called "
                            "all_reduce (sum) of 6 float32 at mlp"));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Mutations, MutationTest,
                         testing::Combine(testing::ValuesIn(kAll),
                                          testing::Values(Change::kSkip, Change::kReorder, Change::kShape,
                                                          Change::kDtype, Change::kRoot, Change::kSite),
                                          testing::Bool()));

std::vector<Step> random_steps(uint64_t seed, int64_t count, int64_t size) {
  Rng rng(seed);
  std::vector<Step> out;
  for (int64_t i = 0; i < count; ++i) {
    Step step;
    step.what = kAll[rng.below(std::size(kAll))];
    step.count = static_cast<int64_t>(rng.below(9));
    step.root = static_cast<int64_t>(rng.below(static_cast<uint64_t>(size)));
    step.dtype = rng.below(2) == 0 ? DType::kFloat32 : DType::kFloat64;
    step.site = rng.below(2) == 0 ? "a" : "b";
    out.push_back(step);
  }
  return out;
}

TEST(CheckedGroup, TenThousandRightCallsAreNoAlarm) {
  std::vector<Step> steps = random_steps(7, 10'000, 4);
  for (const absl::Status& status : run_steps(4, quick_checks(), [&](int64_t) { return steps; })) {
    EXPECT_TRUE(status.ok()) << status;
  }
  steps.resize(1000);
  CheckOptions full = quick_checks();
  full.full = true;
  for (const absl::Status& status : run_steps(4, full, [&](int64_t) { return steps; })) {
    EXPECT_TRUE(status.ok()) << status;
  }
}

// A random sequence in which one rank leaves out, doubles or reshapes one call: nobody goes on as if nothing were.
TEST(CheckedGroup, OneChangedCallOfARandomSequenceIsAlwaysFound) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed, 1);
    const int64_t size = 2 + static_cast<int64_t>(rng.below(3));
    const std::vector<Step> steps = random_steps(seed, 30, size);
    const uint64_t how = rng.below(3);
    const int64_t at = static_cast<int64_t>(rng.below(30));
    const Step& changed = steps[static_cast<size_t>(at)];
    if (changed.what == Do::kBarrier && how == 2) continue;  // it has no shape
    const int64_t culprit = changed.root;                    // takes part in it, also when it is a message
    const auto steps_of = [&](int64_t rank) {
      std::vector<Step> mine = steps;
      if (rank != culprit) return mine;
      if (how == 0) mine.erase(mine.begin() + at);
      if (how == 1) mine.insert(mine.begin() + at, changed);
      if (how == 2) mine[static_cast<size_t>(at)].count += 1;
      return mine;
    };
    CheckOptions options = quick_checks();
    options.full = seed % 2 == 0;
    for (const absl::Status& status : run_steps(size, options, steps_of)) {
      ASSERT_TRUE(is_finding(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("rank")));
    }
  }
}

// Calls that nobody waits for long, whose results are silently wrong with other backends: the update is not reached.
TEST(CheckedGroup, CompareFindsWhatNoCallHasShown) {
  for (const absl::Status& status : run_steps(3, quick_checks(), [](int64_t rank) {
         std::vector<Step> steps(3, Step{Do::kAllReduce, 4, 0, DType::kFloat32, "a"});
         if (rank == 2) steps[1].site = "b";
         return steps;
       })) {
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("group g, call 1: rank 2 called all_reduce (sum) of 4 float32 at b"));
  }
}

TEST(CheckedGroup, ARankThatSkipsToAnotherGroupIsNamed) {
  const RealClock clock;
  CheckOptions options = quick_checks();
  options.clock = &clock;
  run_local_world(3, {.deadline_s = 600}, [&](Communicator& rank) {
    CheckedCommunicator checked(rank, options);
    const auto all = *checked.join({"world", {0, 1, 2}});
    std::unique_ptr<ProcessGroup> pair;
    if (rank.rank() < 2) pair = *checked.join({"pair", {0, 1}});
    absl::Status status;
    if (rank.rank() == 0) status = make(*pair, {Do::kAllReduce, 6, 0, DType::kFloat32, "mlp"});
    if (status.ok()) status = make(*all, {Do::kAllReduce, 2, 0, DType::kFloat64, "loss"});
    EXPECT_TRUE(is_finding(status)) << status;
    // Rank 2 may not be there yet when the circle of the others is found.
    EXPECT_THAT(
        std::string(status.message()),
        testing::AllOf(HasSubstr("for rank 0 in group world, call 0 (all_reduce (sum) of 2 float64 at loss)"),
                       HasSubstr("rank 0 for rank 1 in group pair, call 0 (all_reduce (sum) of 6 float32 at mlp)")));
  });
}

TEST(CheckedGroup, ARankThatLeavesIsNamed) {
  for (const absl::Status& status : run_steps(
           3, quick_checks(),
           [](int64_t rank) {
             return std::vector<Step>(rank == 1 ? 1 : 2, Step{Do::kAllReduce, 4});
           },
           /*compare=*/false)) {
    if (status.ok()) continue;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("group g, call 1 (all_reduce (sum) of 4 float32 at step): rank 1 has ended"));
  }
}

TEST(CheckedGroup, ADeadlineNamesWhoIsMissingAndWhereItIs) {
  CheckOptions options = quick_checks();
  options.deadline_s = 0.1;
  std::mutex mutex;
  std::vector<std::string> dumps;
  options.on_finding = [&](const absl::Status&, const std::string& calls) {
    std::lock_guard lock(mutex);
    dumps.push_back(calls);
  };
  std::atomic<int> ended = 0;
  run_checked_ranks(3, options, [&](CheckedRank rank) {
    ASSERT_TRUE(make(rank.group, {Do::kAllReduce, 3}).ok());
    if (rank.group.rank() == 1) {
      while (ended < 2) std::this_thread::yield();  // computes until the others have given up
      EXPECT_TRUE(absl::IsDeadlineExceeded(make(rank.group, {Do::kBarrier})));
      return;
    }
    const absl::Status status = make(rank.group, {Do::kAllReduce, 4});
    ++ended;
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("group g, call 1 (all_reduce (sum) of 4 float32 at step)"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("missing: rank 1"));
  });
  EXPECT_EQ(dumps.size(), 3u);
  for (const std::string& dump : dumps) EXPECT_THAT(dump, HasSubstr("call 0: all_reduce (sum) of 3 float32 at step"));
}

// All groups of all ranks end, also of those that are not in the group.
TEST(CheckedGroup, AnAbortReachesAll) {
  const RealClock clock;
  CheckOptions options = quick_checks();
  options.clock = &clock;
  run_local_world(3, {.deadline_s = 600}, [&](Communicator& rank) {
    CheckedCommunicator checked(rank, options);
    const auto all = *checked.join({"world", {0, 1, 2}});
    std::unique_ptr<ProcessGroup> pair;
    if (rank.rank() < 2) pair = *checked.join({"pair", {0, 1}});
    if (rank.rank() == 0) {
      pair->abort("rank 0 has no more memory");
      EXPECT_TRUE(absl::IsAborted(all->barrier()->wait()));
      return;
    }
    const absl::Status status = rank.rank() == 1 ? pair->barrier()->wait() : all->barrier()->wait();
    EXPECT_EQ(status, absl::AbortedError("group pair was ended: rank 0 has no more memory"));
  });
}

TEST(CheckedGroup, RunsOfOneWorldAfterAnotherKeepApart) {
  const RealClock clock;
  CheckOptions options = quick_checks();
  options.clock = &clock;
  run_local_world(2, {}, [&](Communicator& rank) {
    for (int run = 0; run < 3; ++run) {
      CheckedCommunicator checked(rank, options);
      const auto group = *checked.join({absl::StrCat("g", run), {0, 1}});
      EXPECT_TRUE(make(*group, {Do::kAllReduce, 3}).ok());
      EXPECT_TRUE(checked.compare(*group).ok());
    }
  });
}

}  // namespace
}  // namespace parvl
