// The folder that a run writes its checkpoints to: whose it is, what is in it, and how a checkpoint appears in it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/status.h"

namespace parvl {

// Keeps a second process from training into the same folder. Held while it lives; gone with the process.
class OutputLock {
 public:
  // Makes OUT if need be, checks that it can be written to, and removes what an earlier process left half written.
  // InvalidArgument naming OUT otherwise, or when another process trains into it.
  static absl::StatusOr<std::unique_ptr<OutputLock>> take(const std::string& out);
  ~OutputLock();
  OutputLock(const OutputLock&) = delete;
  OutputLock& operator=(const OutputLock&) = delete;

 private:
  explicit OutputLock(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

// Step numbers of the checkpoints in OUT: the latest run's first, each run's newest first. They are not checked yet.
std::vector<int64_t> list_checkpoints(const std::string& out);
std::string checkpoint_dir(const std::string& out, int64_t step);

// Where the checkpoint of a step is written. `writer` tells this attempt of the run from all others, so that a process
// of an earlier one that was stopped and wakes up finds no folder to write into.
std::string unpublished_dir(const std::string& out, int64_t step, uint64_t writer);
// Puts `temporary` where `final_dir` is, in one step. A directory that stands there (of a run that was started over)
// changes places with it, or, on a file system that cannot do that, is put aside first, from where OutputLock::take
// brings it back.
absl::Status publish_checkpoint(const std::string& temporary, const std::string& final_dir);

}  // namespace parvl
