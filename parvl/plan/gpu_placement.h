// Which of a machine's GPUs each instance computes on.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/plan/placement.h"

namespace parvl {

// By pool, for each of its instances: the names of its GPUs, one for each of its devices.
using GpuPlacement = std::map<std::string, std::vector<std::vector<std::string>>>;

// Each instance of the pools that compute on GPUs gets its own, in the order of pools and instances. `gpus`: the names
// of those that there are, as CUDA_VISIBLE_DEVICES would list them. InvalidArgument when these are too few.
absl::StatusOr<GpuPlacement> place_on_gpus(const std::vector<const PoolPlan*>& pools,
                                           const std::vector<std::string>& gpus);

}  // namespace parvl
