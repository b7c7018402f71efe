// The name of one instance, which it keeps through its restarts.
#pragma once

#include <cstdint>

#include "parvl/base/ids.h"

namespace parvl {

using InstanceId = StrongId<struct InstanceTag, int64_t>;

}  // namespace parvl
