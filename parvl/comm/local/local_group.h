// Ranks as threads of one process: the same calls, with the strictest order that any backend has. A message is not
// buffered: `send` is done when the receiver has it.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "parvl/comm/communicator.h"

namespace parvl {

struct LocalOptions {
  double deadline_s = 60;  // for each call
};

// One for each rank, to be used by a thread each. Sums are made rank by rank, so they are the same bits on every run.
std::vector<std::unique_ptr<Communicator>> make_local_communicators(int64_t world, const LocalOptions& options);
// Runs `body` once for each rank, each on a thread of its own, and waits for all.
void run_local_world(int64_t world, const LocalOptions& options, const std::function<void(Communicator&)>& body);

}  // namespace parvl
