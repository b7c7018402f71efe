// The way to a run's other ranks by torchrun's variables, and what watches over it.
#pragma once

#include <memory>

#include "parvl/comm/checked_group.h"

namespace parvl {

// By RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; null when they name no more than one process.
absl::StatusOr<std::unique_ptr<Communicator>> communicator_from_environment();

// Which GPU of its machine this process takes, by LOCAL_RANK; 0 when that is not set. Also tells NVIDIA's libraries,
// where the user has not, to make sums that repeat to the bit, and to connect ranks before the first step: call it
// before a GPU is used.
absl::StatusOr<int64_t> local_rank_from_environment();

// How this process's group calls are checked. PARVL_RANK_DEADLINE_SECONDS (600): of a call, for all ranks to come;
// PARVL_RANK_SILENCE_SECONDS (30): after which a rank that gives no sign of life is taken for lost. What is found goes
// to standard error with the last calls; a call that then cannot be ended ends the process. From here on an exception
// that leaves a thread of Gloo is explained before it ends the process.
absl::StatusOr<CheckOptions> checks_from_environment();

}  // namespace parvl
