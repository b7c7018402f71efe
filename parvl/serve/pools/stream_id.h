// The name of one instance's stream, of one process: never used again.
#pragma once

#include "parvl/base/ids.h"

namespace parvl {

using StreamId = StrongId<struct StreamTag, int64_t>;

}  // namespace parvl
