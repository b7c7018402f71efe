// The file behind `parvl serve --record`.
#pragma once

#include <cstdint>
#include <string>

#include "parvl/base/status.h"
#include "parvl/sched/record.h"

namespace parvl {

// Replaces the file `path`, which gets one line after another, each given to the system before the next, so that the
// record of a process that dies ends with the event that it died of. It ends at `max_bytes`, with a line that is cut,
// or when a write fails; either way with one warning, and later lines are dropped. InvalidArgument naming a file that
// cannot be opened. What it returns is for one thread.
absl::StatusOr<RecordedScheduler::Write> record_to(const std::string& path, int64_t max_bytes);

}  // namespace parvl
