// Teacher-forced scores of a data set: the loss, and how often greedy decoding would give exactly the right answer.
#pragma once

#include <functional>

#include "parvl/models/packing.h"
#include "parvl/train/data.h"
#include "parvl/train/run_ranks.h"

namespace parvl {

struct ScoreOptions {
  int64_t batch = 16;
  int64_t max_length = 0;
  int64_t limit = 0;                     // samples; 0: all
  ImageCache* images = nullptr;          // decoded images, as several samples may share one; borrowed, may be null
  std::function<bool()> stop_requested;  // asked after every batch; true: leave with Cancelled
  // The batches are dealt out over the replicas of these ranks, which all call it and ask `stop_requested` as often;
  // every rank gets the whole score. Null: alone.
  const RunRanks* ranks = nullptr;
};

struct Score {
  double loss = 0;      // mean cross-entropy over assistant tokens
  double accuracy = 0;  // share of the samples with assistant tokens in which every one of these is the most likely one
  int64_t samples = 0;  // that have assistant tokens
};

absl::StatusOr<Score> score_dataset(const Model& model, const PromptBuilder& prompts, const Dataset& data,
                                    at::Device device, const ScoreOptions& options);

}  // namespace parvl
