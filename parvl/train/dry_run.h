// `parvl train --dry-run`: what a recipe's ranks would hold and say to each other. Reads the recipe and the model's
// configuration, nothing else: no weights, no data, no other rank.
#pragma once

#include <string>

#include "parvl/base/json.h"
#include "parvl/train/layout_report.h"

namespace parvl {

struct DryRun {
  std::string text;  // the rank table, bytes a rank, and calls a step
  Json json;         // the same: {"assumed", "ranks", "traffic"}, bytes as numbers
};

// Micro batches at their largest, since the data is not read: `micro_batch` samples of data.max_length tokens, all but
// the first of them to learn, and where the model takes images each with one of 32 × 32 patches (less where these would
// be more tokens than a sample has). Images are dealt out as share_images or deal_images does
// with equal ones.
StepMicrobatches largest_microbatches(const Layout& layout);

// InvalidArgument as training would say it; see Layout::create.
absl::StatusOr<DryRun> dry_run(const Recipe& recipe);

}  // namespace parvl
