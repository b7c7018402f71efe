// A step's micro batches through this rank's part of the model, in the order that the pipeline's schedule says. One
// stage is a pipeline too: forward, backward, and nothing to send. A vision encoder on ranks of its own is one more
// stage before the first, of all replicas.
#pragma once

#include <functional>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/plan/pipeline/schedule.h"
#include "parvl/train/micro_batch.h"

namespace parvl {

// When a rank began and ended an action, on the clock that was given.
struct ActionRecord {
  Action action;
  double begin = 0, end = 0;
};

// A micro batch's images, which decide about the schedule.
struct PipelineMicrobatch {
  int64_t replica = 0;  // whose it is
  std::vector<Grid> grids;
  std::vector<int64_t> encoders;  // as make_micro_batch
};

struct PipelineOptions {
  double scale = 1;        // of the loss
  bool recompute = false;  // keep only each piece's input and run it again in the backward
  // The step's micro batches of this replica, or on an encoder's own rank of all, the replicas in turn; and how each is
  // made when it is needed. Every one has a token to learn.
  std::vector<PipelineMicrobatch> microbatches;
  std::function<std::vector<SequenceInput>(int64_t microbatch)> sequences;
  // With one stage: the backward adds nothing more to the parameters whose names start with `prefix`. May be empty.
  std::function<void(const std::string& prefix)> is_final;
  const Clock* clock = nullptr;                 // with `record`
  std::vector<ActionRecord>* record = nullptr;  // filled, for tests and measurements
};

// Adds the micro batches' gradients into main_grad, with what is tied across stages summed, and returns the sum of
// their scaled losses: on the last stage, zero elsewhere (a scalar on the device). All ranks call it.
at::Tensor run_pipeline(const Model& model, const RunRanks& ranks, at::Device device, const PipelineOptions& options);

// The backbone's output "hidden" [T, hidden] of one micro batch without autograd, through all stages: all rows on every
// rank of the last one, undefined elsewhere. All ranks of the replica call it, and the encoder's own ranks, which say
// whose it is.
at::Tensor run_stages(const Model& model, const RunRanks& ranks, const MicroBatch& batch, int64_t replica = 0);

}  // namespace parvl
