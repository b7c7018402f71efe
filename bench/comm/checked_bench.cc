// What checked groups cost: a call of a group of one rank, where nothing else happens, and calls of two ranks over
// Gloo. Bare and checked take turns; medians of the rounds.
#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

#include "parvl/base/check.h"
#include "parvl/comm/checked_group.h"
#include "parvl/comm/comm_site.h"
#include "parvl/comm/gloo/gloo_communicator.h"
#include "parvl/comm/local/local_group.h"

namespace parvl {
namespace {

const RealClock kClock;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Nanoseconds a call.
template <typename Call>
double time_calls(int64_t calls, const Call& call) {
  const int64_t start = kClock.now_ns();
  for (int64_t i = 0; i < calls; ++i) PARVL_CHECK(call().ok(), "a call failed");
  return static_cast<double>(kClock.now_ns() - start) / static_cast<double>(calls);
}

struct Groups {
  std::unique_ptr<ProcessGroup> bare;
  std::unique_ptr<CheckedCommunicator> communicator;
  std::unique_ptr<ProcessGroup> checked;
};

Groups connect(Communicator& ranks) {
  std::vector<int64_t> all;
  for (int64_t r = 0; r < ranks.world(); ++r) all.push_back(r);
  CheckOptions options;
  options.clock = &kClock;
  Groups out;
  out.bare = *ranks.join({"bare", all});
  out.communicator = std::make_unique<CheckedCommunicator>(ranks, options);
  out.checked = *out.communicator->join({"checked", all});
  return out;
}

void measure(const char* what, Communicator& ranks, int64_t count, int64_t calls) {
  const Groups groups = connect(ranks);
  std::vector<float> values(static_cast<size_t>(count));
  const Buffer buffer{values.data(), count, DType::kFloat32};
  const CommSite site("llm_backbone.layers.31.attention.gather");
  std::vector<double> bare, checked, compared;
  for (int round = 0; round < 21; ++round) {
    bare.push_back(time_calls(calls, [&] { return groups.bare->all_reduce(buffer, ReduceOp::kSum)->wait(); }));
    checked.push_back(time_calls(calls, [&] { return groups.checked->all_reduce(buffer, ReduceOp::kSum)->wait(); }));
    compared.push_back(time_calls(calls / 10 + 1, [&] { return groups.communicator->compare(*groups.checked); }));
  }
  if (ranks.rank() > 0) return;
  std::printf("%-34s %10.0f %10.0f %9.3f %12.0f\n", what, median(bare), median(checked), median(checked) / median(bare),
              median(compared));
}

void run() {
  std::printf("%-34s %10s %10s %9s %12s\n", "all_reduce", "bare, ns", "checked", "ratio", "compare, ns");
  run_local_world(1, {}, [](Communicator& ranks) { measure("alone, 1 float32", ranks, 1, 100'000); });
  for (const int64_t count : {int64_t{1024}, int64_t{1} << 20}) {
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([rank, count] {
        GlooOptions options;
        options.rank = rank;
        options.world = 2;
        options.port = 29511;
        options.prefix = std::to_string(count);
        const auto ranks = make_gloo_communicator(options);
        PARVL_CHECK(ranks.ok(), "port 29511 must be free");
        const std::string name = "two over Gloo, " + std::to_string(4 * count) + " bytes";
        measure(name.c_str(), **ranks, count, count > 10'000 ? 20 : 500);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace parvl

int main() { parvl::run(); }
