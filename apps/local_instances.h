// Instances as processes of this machine: `parvl worker`, a child of this program.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/shared_block.h"
#include "parvl/serve/pools/instance_starter.h"

namespace parvl {

// `program`: the executable. `devices`: what each pool computes on, cpu or cuda; on the CPU a process computes with one
// thread. `weights`: the memory that their modules' weights may lie in, kept open for them.
std::unique_ptr<InstanceStarter> make_local_instances(const std::string& program,
                                                      std::map<std::string, std::string> devices,
                                                      std::vector<std::shared_ptr<SharedBlock>> weights);

}  // namespace parvl
