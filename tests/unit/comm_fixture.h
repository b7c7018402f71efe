// N ranks as threads of the test.
#pragma once

#include <functional>
#include <numeric>
#include <vector>

#include "parvl/base/check.h"
#include "parvl/base/clock.h"
#include "parvl/comm/checked_group.h"
#include "parvl/comm/local/local_group.h"

namespace parvl {

// All ranks in one group called g.
inline void run_ranks(int64_t size, const LocalOptions& options, const std::function<void(ProcessGroup&)>& body) {
  GroupSpec all{"g", std::vector<int64_t>(static_cast<size_t>(size))};
  std::iota(all.ranks.begin(), all.ranks.end(), 0);
  run_local_world(size, options, [&](Communicator& rank) {
    auto group = rank.join(all);
    PARVL_CHECK(group.ok(), "the ranks disagree about their group");
    body(**group);
  });
}

// The same, checked. The groups' own deadline is the test's; the checks' patience is short, and decides nothing.
struct CheckedRank {
  CheckedCommunicator& communicator;
  ProcessGroup& group;  // called g
};
inline void run_checked_ranks(int64_t size, CheckOptions options, const std::function<void(CheckedRank)>& body) {
  GroupSpec all{"g", std::vector<int64_t>(static_cast<size_t>(size))};
  std::iota(all.ranks.begin(), all.ranks.end(), 0);
  const RealClock clock;
  options.clock = &clock;
  run_local_world(size, {.deadline_s = 600}, [&](Communicator& rank) {
    CheckedCommunicator checked(rank, options);
    auto group = checked.join(all);
    PARVL_CHECK(group.ok(), "the ranks disagree about their group");
    body({checked, **group});
  });
}
inline CheckOptions quick_checks() {
  CheckOptions out;
  out.patience_s = 0.05;
  out.beat_s = 0.01;
  out.leave_s = 0.05;
  return out;
}

}  // namespace parvl
