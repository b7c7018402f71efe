// Checkpoints of a training run: OUT/step-N/ is a Hugging Face directory; OUT/step-N/trainer/ holds what resuming
// needs. A directory appears whole or not at all, and the SHA-256 of every file, or of every tensor in it, is there.
#pragma once

#include <cstdint>
#include <string>

#include "parvl/base/json.h"
#include "parvl/models/model.h"
#include "parvl/train/optimizer.h"
#include "parvl/train/run_ranks.h"

namespace parvl {

inline constexpr char kStateFile[] = "trainer/state.json";  // step, run, identity

struct CheckpointContents {
  const Model* model = nullptr;
  const Optimizer* optimizer = nullptr;
  const RunRanks* ranks = nullptr;
  uint64_t writer = 0;  // see unpublished_dir; the same on all ranks
  // When the run was first started (ns since 1970), kept by its resumed parts: later steps of an older run that lie in
  // the same folder are not taken for this run's.
  int64_t run = 0;
  Json identity;          // name → value: what must be equal for a resumed run to continue this one (see Trainer)
  std::string copy_from;  // directory of the tokenizer, template and preprocessor files
};

// Writes OUT/step-N with N the optimizer's steps: each rank the optimizer's state that it keeps, the first rank the
// rest, which it gathers one tensor at a time. On failure (disk full) on any rank what was there before is untouched
// and no part of the new one is left. Replaces a directory of that name at once. Returns the directory. All ranks call
// it, with an OUT that they share.
absl::StatusOr<std::string> save_checkpoint(const std::string& out, DType dtype, const CheckpointContents& contents);

// This caller's share of a checkpoint's hashes: every `count`-th, from `index` on.
struct CheckShare {
  int64_t index = 0, count = 1;
};
// Whether all files are there with the hashes that they were written with; the error names the file, and in a file of
// tensors the tensor.
absl::Status check_checkpoint(const std::string& dir, const CheckShare& share = {});

struct ResumeTarget {
  Model* model = nullptr;
  Optimizer* optimizer = nullptr;  // after Optimizer::shard
  Json identity;                   // a name that is not in here is not compared
};
// Fills model and optimizer with what this rank holds of a checkpoint of any layout that check_checkpoint found whole,
// and gives its `run`; reads no other values. Each rank for itself. Errors: another identity (what differs), a tensor
// that is missing. The model may be half filled after an error.
absl::StatusOr<int64_t> load_checkpoint(const std::string& dir, const ResumeTarget& target);

}  // namespace parvl
