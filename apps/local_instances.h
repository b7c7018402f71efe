// Instances as processes of this machine: `parvl worker`, a child of this program.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "parvl/serve/pools/instance_starter.h"

namespace parvl {

// `program`: the executable. `devices`: what each pool computes on, cpu or cuda; on the CPU a process computes with one
// thread.
std::unique_ptr<InstanceStarter> make_local_instances(const std::string& program,
                                                      std::map<std::string, std::string> devices);

}  // namespace parvl
