// Collectives and messages among threads: results, order, and what a rank that does something else leads to.
#include <gmock/gmock.h>

#include <atomic>
#include <numeric>

#include "tests/unit/comm_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

Buffer buffer(std::vector<double>& values) {
  return {values.data(), static_cast<int64_t>(values.size()), DType::kFloat64};
}
Buffer buffer(std::vector<float>& values) {
  return {values.data(), static_cast<int64_t>(values.size()), DType::kFloat32};
}

// Value i of rank r: no two are equal.
std::vector<double> values_of(int64_t rank, int64_t count) {
  std::vector<double> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(static_cast<double>(1000 * rank + i) + 0.25);
  return out;
}

class LocalGroupTest : public testing::TestWithParam<int64_t> {};

TEST_P(LocalGroupTest, CollectivesGiveWhatTheySay) {
  const int64_t size = GetParam();
  for (const int64_t count : {0, 1, 7, 300}) {
    run_ranks(size, {}, [&](ProcessGroup& group) {
      const int64_t rank = group.rank();
      std::vector<double> sum = values_of(rank, count);
      ASSERT_TRUE(group.all_reduce(buffer(sum), ReduceOp::kSum)->wait().ok());
      std::vector<double> highest = values_of(rank, count);
      ASSERT_TRUE(group.all_reduce(buffer(highest), ReduceOp::kMax)->wait().ok());
      std::vector<double> mine = values_of(rank, count), all(static_cast<size_t>(count * size));
      ASSERT_TRUE(group.all_gather(buffer(mine), buffer(all))->wait().ok());
      std::vector<double> wide = values_of(rank, count * size), part(static_cast<size_t>(count));
      ASSERT_TRUE(group.reduce_scatter(buffer(wide), buffer(part))->wait().ok());
      std::vector<double> shared = values_of(rank, count);
      ASSERT_TRUE(group.broadcast(buffer(shared), size - 1)->wait().ok());
      EXPECT_EQ(shared, values_of(size - 1, count));
      EXPECT_EQ(highest, values_of(size - 1, count));
      for (int64_t i = 0; i < count; ++i) {
        const size_t at = static_cast<size_t>(i);
        double want = 0, want_part = 0;
        for (int64_t r = 0; r < size; ++r) {
          want += values_of(r, count)[at];
          want_part += values_of(r, count * size)[static_cast<size_t>(rank * count + i)];
          EXPECT_EQ(all[static_cast<size_t>(r * count + i)], values_of(r, count)[at]);
        }
        EXPECT_EQ(sum[at], want);
        EXPECT_EQ(part[at], want_part);
      }
    });
  }
}

// Rank r sends r + to values to each.
TEST_P(LocalGroupTest, AllToAllTakesPartsOfAnySize) {
  const int64_t size = GetParam();
  run_ranks(size, {}, [&](ProcessGroup& group) {
    std::vector<int64_t> out_counts, in_counts;
    std::vector<double> in;
    for (int64_t to = 0; to < size; ++to) {
      in_counts.push_back(group.rank() + to);
      out_counts.push_back(to + group.rank());
      for (int64_t i = 0; i < group.rank() + to; ++i) in.push_back(static_cast<double>(100 * group.rank() + to));
    }
    std::vector<double> out(static_cast<size_t>(std::accumulate(out_counts.begin(), out_counts.end(), int64_t{0})));
    ASSERT_TRUE(group.all_to_all(buffer(in), in_counts, buffer(out), out_counts)->wait().ok());
    size_t at = 0;
    for (int64_t from = 0; from < size; ++from) {
      for (int64_t i = 0; i < out_counts[static_cast<size_t>(from)]; ++i) {
        EXPECT_EQ(out[at++], static_cast<double>(100 * from + group.rank()));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, LocalGroupTest, testing::Values(1, 2, 3, 8));

// 16-bit values are summed in float32 and rounded once: 256 ones and a half are lost one by one in bfloat16.
TEST(LocalGroup, BFloat16SumsAreRoundedOnce) {
  const int64_t size = 5;
  run_ranks(size, {}, [&](ProcessGroup& group) {
    uint16_t value = group.rank() == 0 ? 0x4380 /* 256 */ : 0x3f00 /* 0.5 */;
    ASSERT_TRUE(group.all_reduce({&value, 1, DType::kBFloat16}, ReduceOp::kSum)->wait().ok());
    EXPECT_EQ(value, 0x4381);  // 258
  });
}

TEST(LocalGroup, CallsMayBeUnderWayTogether) {
  run_ranks(4, {}, [](ProcessGroup& group) {
    std::vector<float> a(10, 1), b(20, 2);
    const auto first = group.all_reduce(buffer(a), ReduceOp::kSum),
               second = group.all_reduce(buffer(b), ReduceOp::kSum);
    ASSERT_TRUE(second->wait().ok());
    ASSERT_TRUE(first->wait().ok());
    EXPECT_EQ(a, std::vector<float>(10, 4));
    EXPECT_EQ(b, std::vector<float>(20, 8));
  });
}

TEST(LocalGroup, MessagesArriveInTheirOrderAndAreNotBuffered) {
  std::atomic<bool> received = false;
  run_ranks(2, {}, [&](ProcessGroup& group) {
    std::vector<float> a(3), b(3);
    if (group.rank() == 0) {
      a = {1, 2, 3};
      b = {4, 5, 6};
      const auto first = group.send(buffer(a), 1), second = group.send(buffer(b), 1);
      ASSERT_TRUE(first->wait().ok());
      EXPECT_TRUE(received);  // done only when the other side has called
      ASSERT_TRUE(second->wait().ok());
      return;
    }
    received = true;
    const auto first = group.receive(buffer(a), 0), second = group.receive(buffer(b), 0);
    ASSERT_TRUE(second->wait().ok());
    ASSERT_TRUE(first->wait().ok());
    EXPECT_EQ(a, (std::vector<float>{1, 2, 3}));
    EXPECT_EQ(b, (std::vector<float>{4, 5, 6}));
  });
}

// Every rank hears who called what.
TEST(LocalGroup, ARankThatCallsSomethingElseIsNamed) {
  run_ranks(3, {}, [](ProcessGroup& group) {
    std::vector<float> values(group.rank() == 1 ? 5 : 6, 1), part(2);
    ASSERT_TRUE(group.barrier()->wait().ok());
    const absl::Status status = group.rank() == 2 ? group.reduce_scatter(buffer(values), buffer(part))->wait()
                                                  : group.all_reduce(buffer(values), ReduceOp::kSum)->wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("group g, call 1: rank 0 called all_reduce of 6 float32, "
                                            "rank 1 all_reduce of 5 float32"));
  });
}

TEST(LocalGroup, UnequalCountsOfAnAllToAllAreNamed) {
  run_ranks(2, {}, [](ProcessGroup& group) {
    std::vector<float> in(4), out(4);
    const std::vector<int64_t> even = {2, 2}, odd = {1, 3};
    const absl::Status status = group.all_to_all(buffer(in), even, buffer(out), group.rank() == 0 ? even : odd)->wait();
    EXPECT_THAT(status.message(), HasSubstr("rank 0 sends 2 values to rank 1, which awaits 1"));
  });
}

TEST(LocalGroup, AMissingRankIsNamedAfterTheDeadline) {
  run_ranks(3, {.deadline_s = 0.05}, [](ProcessGroup& group) {
    if (group.rank() == 1) return;
    std::vector<float> values(6, 1);
    const absl::Status status = group.all_reduce(buffer(values), ReduceOp::kSum)->wait();
    EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsAborted(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("(all_reduce of 6 float32)"));
    EXPECT_THAT(status.message(), HasSubstr("was not done within 0.05 s; missing: rank 1"));
  });
}

TEST(LocalGroup, AnAbortReachesAllRanks) {
  run_ranks(3, {}, [](ProcessGroup& group) {
    if (group.rank() == 2) {
      group.abort("rank 2 has no more memory");
      return;
    }
    const absl::Status status = group.barrier()->wait();
    EXPECT_TRUE(absl::IsAborted(status));
    EXPECT_THAT(status.message(), HasSubstr("group g was ended: rank 2 has no more memory"));
  });
}

// A rank that gives up in the middle must not leave others with pointers into its memory.
TEST(LocalGroup, AnAbandonedCallEndsTheGroup) {
  run_ranks(2, {}, [](ProcessGroup& group) {
    std::vector<float> values(6, 1);
    if (group.rank() == 0) {
      group.send(buffer(values), 1);
      return;
    }
    EXPECT_TRUE(absl::IsAborted(group.barrier()->wait()));
  });
}

TEST(LocalGroup, RanksThatDisagreeAboutAGroupAreToldSo) {
  run_local_world(2, {}, [](Communicator& rank) {
    const auto first = rank.join({"a", {0, 1}});
    ASSERT_TRUE(first.ok());
    ASSERT_TRUE((*first)->barrier()->wait().ok());
    if (rank.rank() == 0) return;
    EXPECT_THAT(rank.join({"a", {1}}).status().message(),
                HasSubstr("group a: rank 1 says it has the ranks 1, another"));
  });
}

}  // namespace
}  // namespace parvl
