// Checkpoints of a training run: OUT/step-N/ is a Hugging Face directory; OUT/step-N/trainer/ holds what resuming
// needs. A directory appears whole or not at all, and every file's SHA-256 is in trainer/manifest.json.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/json.h"
#include "parvl/models/model.h"
#include "parvl/train/optimizer.h"
#include "parvl/train/run_ranks.h"

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

struct CheckpointContents {
  const Model* model = nullptr;
  const Optimizer* optimizer = nullptr;
  const RunRanks* ranks = nullptr;  // the first of which writes
  // When the run was first started (ns since 1970), kept by its resumed parts: later steps of an older run that lie in
  // the same folder are not taken for this run's.
  int64_t run = 0;
  Json identity;          // name → value: what must be equal for a resumed run to continue this one (see Trainer)
  std::string copy_from;  // directory of the tokenizer, template and preprocessor files
};

// Writes OUT/step-N with N the optimizer's steps. On failure (disk full) what was there before is untouched and no part
// of the new one is left. Replaces a directory of that name at once. Returns the directory. All ranks call it.
absl::StatusOr<std::string> save_checkpoint(const std::string& out, DType dtype, const CheckpointContents& contents);

// Step numbers of the checkpoints in OUT: the latest run's first, each run's newest first. They are not checked yet.
std::vector<int64_t> list_checkpoints(const std::string& out);
std::string checkpoint_dir(const std::string& out, int64_t step);

// Whether all files are there with the hashes that they were written with; the error names the file.
absl::Status check_checkpoint(const std::string& dir);

struct ResumeTarget {
  Model* model = nullptr;
  Optimizer* optimizer = nullptr;
  Json identity;  // a name that is not in here is not compared
};
// Fills model and optimizer from a checkpoint directory after check_checkpoint, and gives its `run`. Errors: damaged
// (which file), another identity (what differs). The model may be half filled after an error.
absl::StatusOr<int64_t> load_checkpoint(const std::string& dir, const ResumeTarget& target);

}  // namespace parvl
