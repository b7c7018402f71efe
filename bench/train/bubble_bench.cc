// How far a pipeline's steps are from what its schedule predicts: the stages' ranks are threads of this process, on a
// core each. A step is repeated; from what each of its actions took by itself plan/pipeline/execution.h predicts when
// each ends, which is compared with the makespan and bubble that were measured. Medians over the steps.
//
//   OMP_NUM_THREADS=1 build/bench/bubble_bench [ROUNDS [CASE]]     in the checkout, on a machine with 4 quiet cores
//
// CASE: only those whose names hold it.
//
// Ends with 1 when a makespan or bubble is off by more than 10 %.
#include <ATen/Parallel.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <thread>

#include "bench/train/bench_model.h"
#include "parvl/base/check.h"
#include "parvl/comm/local/local_group.h"
#include "parvl/plan/pipeline/execution.h"

namespace parvl {
namespace {

constexpr double kBound = 0.10;
constexpr int kWarmUps = 2, kLayers = 12, kMicroBatches = 12;
const RealClock kClock;

struct Case {
  const char* name;
  std::vector<int64_t> stages;  // layers of each
  bool ragged = false, images = false;
};

const std::vector<Case> kCases = {
    {"pp 2, even", {6, 6}},
    {"pp 2, ragged", {6, 6}, true},
    {"pp 2, uneven, ragged", {8, 4}, true},
    {"pp 3, ragged", {4, 4, 4}, true},
    {"pp 3, uneven, ragged", {2, 6, 4}, true},
    {"pp 4, even", {3, 3, 3, 3}},
    {"pp 4, ragged", {3, 3, 3, 3}, true},
    {"pp 4, uneven, ragged", {1, 5, 4, 2}, true},
    {"pp 2, ragged, images", {6, 6}, true, true},
    {"pp 4, ragged, images", {3, 3, 3, 3}, true, true},
};

// One sample a micro batch; a ragged one has a fifth to twice the words of an even one.
void write_data(const std::string& folder, const Case& c) {
  std::vector<int> words;
  for (int i = 0; i < kMicroBatches; ++i) words.push_back(c.ragged ? 20 + i * 7 % kMicroBatches * 16 : 100);
  write_bench_samples(folder, words, c.images);
}

Recipe recipe_of(const std::string& folder, const Case& c) {
  Recipe out = bench_recipe(folder, /*micro_batch=*/1, kMicroBatches);
  out.parallel.llm.pp = static_cast<int64_t>(c.stages.size());
  out.parallel.llm.stages = c.stages;
  return out;
}

// On a core of its own where there are enough; its matrix products use no other.
void settle(int64_t rank) {
  at::set_num_threads(1);
  if (std::thread::hardware_concurrency() < kCases.back().stages.size()) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<size_t>(rank), &cores);
  ::pthread_setaffinity_np(::pthread_self(), sizeof cores, &cores);
}

using Steps = std::vector<std::vector<std::vector<ActionRecord>>>;  // by round, rank, action

Steps measure(const Case& c, const std::string& folder, int rounds) {
  const Recipe recipe = recipe_of(folder, c);
  const auto world = static_cast<int64_t>(c.stages.size());
  std::vector<std::vector<ActionRecord>> records(c.stages.size());
  Steps out(static_cast<size_t>(rounds), records);
  run_local_world(world, {}, [&](Communicator& communicator) {
    const auto rank = static_cast<size_t>(communicator.rank());
    settle(communicator.rank());
    const auto trainer = bench_trainer(recipe, folder, kClock, communicator, &records[rank]);
    const GlobalBatch batch = *trainer->make_loader()->next();
    for (int round = -kWarmUps; round < rounds; ++round) {
      records[rank].clear();
      PARVL_CHECK(trainer->compute_gradients(batch).ok(), "a step failed");
      if (round >= 0) out[static_cast<size_t>(round)][rank] = records[rank];
    }
  });
  return out;
}

bool computes(const Action& action) { return !action.is_message() && !action.is_collective(); }

// The schedule that the ranks carried out, as they recorded it.
PipelineSchedule schedule_of(const std::vector<std::vector<ActionRecord>>& step, bool images) {
  PipelineSchedule out;
  out.shape.stages = static_cast<int64_t>(step.size());
  for (size_t rank = 0; rank < step.size(); ++rank) {
    const auto stage = static_cast<int64_t>(rank);
    out.ranks.push_back({0, stage, images ? stage : -1, 0, 0, {}});
    for (const ActionRecord& record : step[rank]) out.ranks.back().actions.push_back(record.action);
  }
  return out;
}

// What an action took once all who take part in it were there.
double own_seconds(const PipelineSchedule& schedule, const std::vector<std::vector<ActionRecord>>& step, size_t rank,
                   size_t index) {
  const ActionRecord& record = step[rank][index];
  if (computes(record.action)) return record.end - record.begin;
  if (record.action.kind == ActionKind::kReceive) return 0;
  const auto find = [&](int64_t other, auto same) -> const ActionRecord& {
    const auto& records = step[static_cast<size_t>(other)];
    return *std::find_if(records.begin(), records.end(), same);
  };
  if (record.action.kind == ActionKind::kSend) {
    const ActionRecord& received = find(record.action.peer, [&](const ActionRecord& other) {
      return other.action.kind == ActionKind::kReceive && other.action.microbatch == record.action.microbatch &&
             other.action.payload == record.action.payload && other.action.peer == static_cast<int64_t>(rank);
    });
    return std::max(0.0, received.end - std::max(record.end, received.begin));
  }
  double all_there = 0;
  for (const int64_t member : schedule.members(static_cast<int64_t>(rank), record.action)) {
    const ActionRecord& theirs = find(member, [&](const ActionRecord& other) {
      return other.action.kind == record.action.kind && other.action.microbatch == record.action.microbatch &&
             other.action.payload == record.action.payload;
    });
    all_there = std::max(all_there, theirs.begin);
  }
  return record.end - all_there;
}

struct Figures {
  double makespan = 0, bubble = 0;
};

Figures measured(const std::vector<std::vector<ActionRecord>>& step) {
  double begin = step[0][0].begin, end = begin, busy = 0;
  for (const auto& records : step) {
    for (const ActionRecord& record : records) {
      begin = std::min(begin, record.begin);
      end = std::max(end, record.end);
      if (computes(record.action)) busy += record.end - record.begin;
    }
  }
  return {end - begin, 1 - busy / ((end - begin) * static_cast<double>(step.size()))};
}

// From what each action of this very step took: the noise of a machine makes ranks wait, too, and no schedule knows it
// beforehand.
Figures predicted(const std::vector<std::vector<ActionRecord>>& step, bool images) {
  const PipelineSchedule schedule = schedule_of(step, images);
  std::map<std::pair<int64_t, Action>, double> seconds;
  for (size_t rank = 0; rank < step.size(); ++rank) {
    for (size_t i = 0; i < step[rank].size(); ++i) {
      seconds[{static_cast<int64_t>(rank), step[rank][i].action}] = own_seconds(schedule, step, rank, i);
    }
  }
  const absl::StatusOr<PipelineTimes> times = predict(schedule, [&](int64_t rank, const Action& action) {
    return seconds.at({rank, action});
  });
  PARVL_CHECK(times.ok(), std::string(times.status().message()).c_str());
  return {times->makespan, times->bubble_share()};
}

int run(int rounds, const std::string& only) {
  const std::string folder = make_bench_folder("bubble");
  write_bench_config(folder, kLayers);
  std::printf("%u cores, medians of %d steps of %d micro batches\n", std::thread::hardware_concurrency(), rounds,
              kMicroBatches);
  std::printf("%-24s %12s %12s %7s %10s %10s %7s\n", "", "makespan, ms", "predicted", "ratio", "bubble, %", "predicted",
              "ratio");
  bool within = true;
  for (const Case& c : kCases) {
    if (std::string(c.name).find(only) == std::string::npos) continue;
    std::filesystem::remove_all(folder + "/out");
    write_data(folder, c);
    const Steps steps = measure(c, folder, rounds);
    std::array<std::vector<double>, 6> columns;  // makespan and bubble: measured, predicted, ratio
    for (const auto& step : measure(c, folder, rounds)) {
      const Figures got = measured(step), want = predicted(step, c.images);
      const double row[] = {got.makespan, want.makespan, got.makespan / want.makespan,
                            got.bubble,   want.bubble,   got.bubble / want.bubble};
      for (size_t i = 0; i < columns.size(); ++i) columns[i].push_back(row[i]);
    }
    std::array<double, 6> m;
    for (size_t i = 0; i < m.size(); ++i) m[i] = median(columns[i]);
    within = within && std::abs(m[2] - 1) <= kBound && std::abs(m[5] - 1) <= kBound;
    std::printf("%-24s %12.1f %12.1f %7.3f %10.1f %10.1f %7.3f\n", c.name, m[0] * 1e3, m[1] * 1e3, m[2], m[3] * 100,
                m[4] * 100, m[5]);
    std::fflush(stdout);
  }
  std::filesystem::remove_all(folder);
  return conclude(within, kBound);
}

}  // namespace
}  // namespace parvl

int main(int argc, char** argv) {
  return parvl::run(argc > 1 ? std::max(1, std::atoi(argv[1])) : 15, argc > 2 ? argv[2] : "");
}
