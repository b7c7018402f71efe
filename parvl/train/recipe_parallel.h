// The recipe's `parallel` section.
#pragma once

#include "parvl/base/config.h"
#include "parvl/base/parallel_spec.h"

namespace parvl {

// InvalidArgument for what the contract forbids (an unknown key, degrees that do not fit together); Unimplemented,
// naming the key, for a layout that is valid but not built yet: all but data parallel with zero 0 or 1,
// tensor parallel, and a pipeline of the backbone.
absl::StatusOr<ParallelSpec> read_parallel(ConfigReader& recipe);

}  // namespace parvl
