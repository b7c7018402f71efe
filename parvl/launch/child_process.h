// fork and exec for launchers.
#pragma once

#include <sys/types.h>

#include "parvl/base/status.h"
#include "parvl/launch/children.h"

namespace parvl {

struct ChildProcess {
  pid_t pid = -1;
  int descriptor = -1;  // readable when it has ended; the caller's to close
};

// In a process group of its own, with default signals, and ended by the kernel when the calling thread ends. A program
// that cannot be started says so on standard error and ends with exit code 2.
absl::StatusOr<ChildProcess> start_child(const ChildCommand& command);
// Waits for one that has ended, and kills what it started and left. Its wait status.
int reap_child(const ChildProcess& child);

}  // namespace parvl
