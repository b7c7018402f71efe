// Balanced packing: a partition that is never worse than the plain order, with its bound; LPT against the optimum.
#include <absl/strings/str_join.h>
#include <gmock/gmock.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <numeric>

#include "parvl/base/rng.h"
#include "parvl/plan/balance.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Loads {
  std::vector<double> microbatches, replicas;
};

Loads loads(const std::vector<double>& costs, const std::vector<int64_t>& order, int64_t micro_batch,
            int64_t replicas) {
  Loads out{std::vector<double>(costs.size() / static_cast<size_t>(micro_batch), 0),
            std::vector<double>(static_cast<size_t>(replicas), 0)};
  for (size_t place = 0; place < order.size(); ++place) {
    const size_t microbatch = place / static_cast<size_t>(micro_batch);
    const double cost = costs[static_cast<size_t>(order[place])];
    out.microbatches[microbatch] += cost;
    out.replicas[microbatch % out.replicas.size()] += cost;
  }
  return out;
}

double most(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }
double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

std::vector<int64_t> plain(size_t size) {
  std::vector<int64_t> out(size);
  std::iota(out.begin(), out.end(), int64_t{0});
  return out;
}

TEST(Balance, CostliestSamplesAreTakenApart) {
  // Micro batches {9, 1} and {8, 2}.
  EXPECT_THAT(*balanced_order({9, 8, 2, 1}, 2, 1), ElementsAre(0, 3, 1, 2));
  // One replica {7} and {1}, the other {5} and {3}; each begins with its costliest.
  EXPECT_THAT(*balanced_order({1, 3, 5, 7}, 1, 2), ElementsAre(3, 2, 0, 1));
  EXPECT_THAT(*balanced_order({1, 1, 1, 1}, 2, 2), ElementsAre(0, 2, 1, 3));
  EXPECT_TRUE(balanced_order({}, 4, 2)->empty());
}

TEST(Balance, WhereThePlainOrderIsBetterItStays) {
  // Rounds would give {6, 3, 3} and {5, 4, 3}, or worse; as they stand both micro batches are 12.
  const std::vector<double> costs = {6, 3, 3, 5, 4, 3};
  const Loads as_they_stand = loads(costs, *balanced_order(costs, 3, 1), 3, 1);
  EXPECT_THAT(as_they_stand.microbatches, ElementsAre(12, 12));
  // Two replicas of one micro batch each: 13 and 13, where rounds give 14 and 12.
  const std::vector<double> replicas = {7, 3, 3, 5, 4, 4};
  EXPECT_THAT(loads(replicas, *balanced_order(replicas, 3, 2), 3, 2).replicas, ElementsAre(13, 13));
}

TEST(Balance, ABatchThatDoesNotDivideIsRefused) {
  EXPECT_THAT(balanced_order({1, 2, 3}, 2, 1).status().message(),
              HasSubstr("3 samples is no multiple of micro_batch · replicas (2 · 1)"));
  EXPECT_FALSE(balanced_order({1, 2}, 0, 1).ok());
}

std::vector<double> any_costs(size_t size) {
  return *rc::gen::container<std::vector<double>>(size, rc::gen::map(rc::gen::inRange(0, 1000), [](int cost) {
                                                    return cost < 500 ? 10.0 : static_cast<double>(cost);
                                                  }));
}

RC_GTEST_PROP(Balance, IsAPartitionAndNeverWorse, ()) {
  const int64_t micro_batch = *rc::gen::inRange<int64_t>(1, 5), replicas = *rc::gen::inRange<int64_t>(1, 5);
  const int64_t turns = *rc::gen::inRange<int64_t>(1, 6);
  const std::vector<double> costs = any_costs(static_cast<size_t>(micro_batch * replicas * turns));
  const std::vector<int64_t> order = *balanced_order(costs, micro_batch, replicas);
  RC_ASSERT(order == *balanced_order(costs, micro_batch, replicas));
  std::vector<int64_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  RC_ASSERT(sorted == plain(costs.size()));
  const Loads before = loads(costs, plain(costs.size()), micro_batch, replicas),
              after = loads(costs, order, micro_batch, replicas);
  RC_ASSERT(most(after.replicas) <= most(before.replicas));
  if (most(after.replicas) >= most(before.replicas)) {
    RC_ASSERT(most(after.microbatches) <= most(before.microbatches));
  }
  const double widest = most(costs) - *std::min_element(costs.begin(), costs.end());
  const auto share = [](int64_t bins) { return 1 - 1.0 / static_cast<double>(bins); };
  RC_ASSERT(most(after.replicas) <= mean(after.replicas) + widest * share(replicas) + 1e-9);
  for (size_t g = 0; g < after.microbatches.size(); ++g) {
    const double own_mean = after.replicas[g % after.replicas.size()] / static_cast<double>(turns);
    RC_ASSERT(after.microbatches[g] <= own_mean + widest * share(turns) + 1e-9);
  }
}

// The samples' own order changes which of equal samples stands where, and nothing else.
RC_GTEST_PROP(Balance, DependsOnTheCostsAlone, ()) {
  const int64_t micro_batch = *rc::gen::inRange<int64_t>(1, 4), count = *rc::gen::inRange<int64_t>(1, 6);
  std::vector<double> costs = any_costs(static_cast<size_t>(micro_batch * count));
  const auto largest = [&] {
    return most(loads(costs, *balanced_order(costs, micro_batch, 1), micro_batch, 1).microbatches);
  };
  std::sort(costs.begin(), costs.end());
  const double one = largest();
  std::reverse(costs.begin(), costs.end());
  const double other = largest();
  // Sorted orders are the worst to begin with, so both are what the rounds give.
  RC_ASSERT(std::abs(one - other) <= 1e-9);
}

// Samples as of a mixed data set: text short, images long, costs log-normal around each.
TEST(Balance, MixedSamplesBecomeLevel) {
  Rng rng(7);
  double before = 0, after = 0;
  constexpr int kSteps = 50;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<double> costs;
    for (int i = 0; i < 64; ++i) costs.push_back(std::exp(0.5 * rng.normal()) * (rng.below(2) == 0 ? 1 : 8));
    const auto worst = [&](const std::vector<int64_t>& order) {
      const Loads of = loads(costs, order, 4, 4);
      return std::pair(most(of.microbatches) / mean(of.microbatches), most(of.replicas) / mean(of.replicas));
    };
    before += worst(plain(costs.size())).first / kSteps;
    const auto [microbatches, replicas] = worst(*balanced_order(costs, 4, 4));
    after += microbatches / kSteps;
    EXPECT_LT(replicas, 1.1);
  }
  EXPECT_GT(before, 1.5);
  EXPECT_LT(after, 1.25);
}

double best_spread(const std::vector<double>& costs, size_t item, std::vector<double>& parts) {
  if (item == costs.size()) return most(parts);
  double best = INFINITY;
  for (double& part : parts) {
    part += costs[item];
    best = std::min(best, best_spread(costs, item + 1, parts));
    part -= costs[item];
  }
  return best;
}

TEST(Spread, TheCostliestFirst) {
  EXPECT_THAT(spread({1, 5, 4, 3}, 2), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(spread({2, 2}, 3), ElementsAre(0, 1));
  EXPECT_THAT(spread({}, 3), ElementsAre());
}

RC_GTEST_PROP(Spread, IsWithinGrahamsBound, ()) {
  const int64_t parts = *rc::gen::inRange<int64_t>(1, 4);
  const std::vector<double> costs = any_costs(*rc::gen::inRange<size_t>(0, 8));
  std::vector<double> got(static_cast<size_t>(parts), 0), work = got;
  const std::vector<int64_t> to = spread(costs, parts);
  for (size_t i = 0; i < costs.size(); ++i) got.at(static_cast<size_t>(to[i])) += costs[i];
  RC_ASSERT(most(got) <= best_spread(costs, 0, work) * (4.0 / 3 - 1.0 / (3 * static_cast<double>(parts))) + 1e-9);
}

}  // namespace
}  // namespace parvl
