// N ranks as threads of the test.
#pragma once

#include <functional>
#include <numeric>
#include <vector>

#include "parvl/base/check.h"
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

}  // namespace parvl
