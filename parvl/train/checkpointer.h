// Checkpoints of a training run: OUT/step-N/ is a Hugging Face directory; OUT/step-N/trainer/ holds what resuming needs.
// A directory appears whole or not at all, and every file's SHA-256 is in trainer/manifest.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parvl/models/model.h"
#include "parvl/train/optimizer.h"

namespace parvl {

struct CheckpointContents {
  const Model* model = nullptr;
  const Optimizer* optimizer = nullptr;
  int64_t step = 0;       // steps done
  std::string identity;   // what must be equal for a resumed run to continue this one (see Trainer)
  std::string copy_from;  // directory of the tokenizer, template and preprocessor files
};

// Writes OUT/step-N. On failure (disk full) what was there before is untouched and no part of the new one is left. Returns
// the directory.
absl::StatusOr<std::string> save_checkpoint(const std::string& out, DType dtype, const CheckpointContents& contents);

// Step numbers of the whole-looking checkpoints in OUT, newest first.
std::vector<int64_t> list_checkpoints(const std::string& out);

// Fills model and optimizer from a checkpoint directory after checking every hash. Errors: damaged (which file), another
// identity (what differs).
struct ResumeTarget {
  Model* model = nullptr;
  Optimizer* optimizer = nullptr;
  std::string identity;
};
absl::StatusOr<int64_t> load_checkpoint(const std::string& dir, const ResumeTarget& target);  // the steps done

}  // namespace parvl
