// The recipe's `parallel` section: checked in full, though only one process is available yet.
#pragma once

#include "parvl/base/config.h"

namespace parvl {

// InvalidArgument for what the contract forbids (an unknown key, degrees that do not fit together); Unimplemented,
// naming the key, for a layout that is valid but not the one-process one.
absl::Status check_parallel(ConfigReader& recipe);

}  // namespace parvl
