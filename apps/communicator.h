// The way to a run's other ranks by torchrun's variables.
#pragma once

#include <memory>

#include "parvl/comm/communicator.h"

namespace parvl {

// By RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; null when they name no more than one process.
absl::StatusOr<std::unique_ptr<Communicator>> communicator_from_environment();

}  // namespace parvl
