// Instances as processes of this machine: `parvl worker`, a child of this program.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parvl/base/shared_block.h"
#include "parvl/plan/gpu_placement.h"
#include "parvl/serve/pools/instance_starter.h"

namespace parvl {

// `program`: the executable. `gpus`: of the pools that compute on GPUs, which ones each instance sees; it keeps them
// when it starts again. On the CPU a process computes with one thread. `weights`: the memory that their modules'
// weights may lie in, kept open for them.
std::unique_ptr<InstanceStarter> make_local_instances(const std::string& program, GpuPlacement gpus,
                                                      std::vector<std::shared_ptr<SharedBlock>> weights);

}  // namespace parvl
