// A real encoding and a real decoding, so that the first request does not pay for what is made once, and what is broken
// shows before anybody waits for it.
#pragma once

#include "parvl/base/status.h"
#include "parvl/exec/engine.h"

namespace parvl {

// Blocks until both are done.
absl::Status warm_up(Engine& engine);

}  // namespace parvl
