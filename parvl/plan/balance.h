// Unequal items over equal workers: the samples of a global batch over micro batches and replicas, images over the
// ranks of an encoder. Pure: a function of the costs alone, ties go to the earlier item, so all ranks agree.
#pragma once

#include <absl/types/span.h>

#include <cstdint>
#include <vector>

#include "parvl/base/status.h"

namespace parvl {

// order[place] = the sample that stands at that place of the global batch, so that micro batch g is the samples at
// places g · micro_batch … (g + 1) · micro_batch − 1 and belongs to replica g mod replicas, as BatchShare deals them
// out. The samples of the step stay the same, each once; so does the number of each micro batch's.
//
// `costs`: of each sample in the plain order, ≥ 0: what a micro batch takes must be about their sum (training_flops of
// the sample's tokens and patches). Samples go to replicas, then each replica's to its micro batches, a round at a
// time: each gets one sample, the one with the least so far the costliest of the round. So the loads of two never
// differ by more than the widest round (Coffman, Frederickson and Lueker's restricted LPT, 1984) before the swaps, and
// with d the costliest sample less the cheapest the costliest replica is at most (1 − 1 / replicas) · d above the mean,
// and a micro batch (1 − 1 / a replica's micro batches) · d above its replica's. No replica costs more than the
// costliest in the plain order; where that is no better, neither does a micro batch. A replica's micro batches come the
// costliest first, so that neighbours in its pipeline are alike.
//
// InvalidArgument: the number of samples is not a multiple of micro_batch · replicas.
absl::StatusOr<std::vector<int64_t>> balanced_order(absl::Span<const double> costs, int64_t micro_batch,
                                                    int64_t replicas);

// The part of each item; parts may get any number of them. The costliest first, each to the part with the least so far
// (LPT): the costliest part is at most 4/3 − 1/(3 · parts) of the best possible (Graham, 1969).
std::vector<int64_t> spread(absl::Span<const double> costs, int64_t parts);
// The same onto parts that have `load` already, which grows: one set of items after another stays even.
std::vector<int64_t> spread_onto(absl::Span<const double> costs, std::vector<double>& load);

}  // namespace parvl
