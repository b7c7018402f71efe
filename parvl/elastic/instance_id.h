// The name of one instance, which it keeps through its restarts.
#pragma once

#include <cstdint>
#include <string>

#include "parvl/base/ids.h"

namespace parvl {

using InstanceId = StrongId<struct InstanceTag, int64_t>;

// What it is called where names are texts: who sends, who receives and who fences must mean the same one.
inline std::string instance_name(InstanceId id) { return "instance-" + std::to_string(id.value); }

}  // namespace parvl
