// N ranks as threads of the test.
#pragma once

#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "parvl/base/check.h"
#include "parvl/comm/local/local_group.h"

namespace parvl {

// Runs `body` once for each rank, each on a thread of its own, and waits for all.
inline void run_world(int64_t size, const LocalOptions& options, const std::function<void(Communicator&)>& body) {
  const auto ranks = make_local_communicators(size, options);
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) threads.emplace_back([&body, &rank] { body(*rank); });
  for (std::thread& thread : threads) thread.join();
}

// All ranks in one group called g.
inline void run_ranks(int64_t size, const LocalOptions& options, const std::function<void(ProcessGroup&)>& body) {
  GroupSpec all{"g", std::vector<int64_t>(static_cast<size_t>(size))};
  std::iota(all.ranks.begin(), all.ranks.end(), 0);
  run_world(size, options, [&](Communicator& rank) {
    auto group = rank.join(all);
    PARVL_CHECK(group.ok(), "the ranks disagree about their group");
    body(**group);
  });
}

}  // namespace parvl
