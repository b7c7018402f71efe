// What the checks of group calls cost of a real training step: the calls that a step makes, counted below the checks,
// times what a checked call takes more than a bare one on a group of one rank, where nothing else happens; and the
// comparison of hashes before the update. Ranks are threads, whose calls are the quickest that any backend has.
//
//   OMP_NUM_THREADS=1 build/bench/checks_bench     in the checkout
//
// Ends with 1 when the checks take more than 2 % of a step.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "bench/train/bench_model.h"
#include "parvl/comm/checked_group.h"
#include "parvl/comm/local/local_group.h"
#include "tests/unit/comm_counting.h"

namespace parvl {
namespace {

constexpr double kBound = 0.02;
const RealClock kClock;

template <typename Body>
double seconds_of(const Body& body) {
  const double begin = kClock.now_seconds();
  body();
  return kClock.now_seconds() - begin;
}

// Seconds that a checked call takes more than a bare one.
double seconds_a_call() {
  constexpr int kCalls = 20'000;
  std::vector<double> more;
  run_local_world(1, {}, [&](Communicator& ranks) {
    CheckOptions options;
    options.clock = &kClock;
    const auto bare = *ranks.join({"bare", {0}});
    CheckedCommunicator checking(ranks, options);
    const auto checked = *checking.join({"checked", {0}});
    float value = 0;
    const auto calls = [&](ProcessGroup& group) {
      return seconds_of([&] {
        for (int i = 0; i < kCalls; ++i) {
          PARVL_CHECK(group.all_reduce({&value, 1, DType::kFloat32}, ReduceOp::kSum)->wait().ok(), "a call failed");
        }
      });
    };
    for (int round = 0; round < 21; ++round) more.push_back((calls(*checked) - calls(*bare)) / kCalls);
  });
  return std::max(0.0, median(more));
}

struct StepCost {
  double step = 0, compare = 0;  // seconds
  int64_t calls = 0;             // of one rank
};

StepCost measure(const std::string& folder, const ModuleLayout& layout, int64_t zero) {
  constexpr int kRounds = 9;
  Recipe recipe = bench_recipe(folder, /*micro_batch=*/1, /*global_batch=*/8);
  recipe.parallel.llm = layout;
  recipe.parallel.zero = zero;
  std::filesystem::remove_all(recipe.train.out);
  StepCost out;
  run_local_world(layout.product(), {}, [&](Communicator& inner) {
    CountingCommunicator communicator(inner);
    const auto trainer = bench_trainer(recipe, folder, kClock, communicator);
    const GlobalBatch batch = *trainer->make_loader()->next();
    std::vector<double> steps, compares;
    for (int round = 0; round < kRounds; ++round) {
      communicator.take();
      steps.push_back(seconds_of([&] { PARVL_CHECK(trainer->train_step(batch).ok(), "a step failed"); }));
      const CallCounts counts = communicator.take();
      PARVL_CHECK(trainer->ranks().agree(absl::OkStatus()).ok(), "a rank failed");  // all are here, so none waits
      compares.push_back(seconds_of([&] { PARVL_CHECK(trainer->ranks().compare().ok(), "calls differ"); }));
      if (inner.rank() > 0 || round > 0) continue;
      // Receives are not counted; a stage receives as often as it sends.
      for (const auto& [call, count] : counts.of) out.calls += count.calls * (call.second == "send" ? 2 : 1);
    }
    if (inner.rank() > 0) return;
    out.step = median(steps);
    out.compare = median(compares);
  });
  return out;
}

int run() {
  const std::string folder = make_bench_folder("checks");
  write_bench_config(folder, /*layers=*/4);
  write_bench_samples(folder, {20, 40, 60, 30, 50, 25, 45, 55}, /*images=*/true);
  const double a_call = seconds_a_call();
  std::printf("a checked call takes %.0f ns more\n%-20s %10s %10s %12s %12s %8s\n", a_call * 1e9, "layout", "step, ms",
              "calls", "compare, us", "checks, us", "share");
  bool within = true;
  const std::vector<std::tuple<const char*, ModuleLayout, int64_t>> layouts = {
      {"dp 2", {.dp = 2}, 0}, {"dp 2, zero 1", {.dp = 2}, 1}, {"tp 2", {.tp = 2}, 0}, {"pp 2", {.pp = 2}, 0}};
  for (const auto& [name, layout, zero] : layouts) {
    const StepCost cost = measure(folder, layout, zero);
    const double checks = static_cast<double>(cost.calls) * a_call + cost.compare, share = checks / cost.step;
    within = within && share <= kBound;
    std::printf("%-20s %10.1f %10ld %12.1f %12.1f %7.2f%%\n", name, cost.step * 1e3, static_cast<long>(cost.calls),
                cost.compare * 1e6, checks * 1e6, share * 100);
    std::fflush(stdout);
  }
  std::filesystem::remove_all(folder);
  return conclude(within, kBound);
}

}  // namespace
}  // namespace parvl

int main() { return parvl::run(); }
