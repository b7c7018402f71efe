// Ranks with a GPU each, through NCCL; what lies in host memory goes through another communicator, Gloo's.
#pragma once

#include <memory>

#include "parvl/comm/communicator.h"

namespace parvl {

// Groups that take values of either memory: a call's buffers are all in the host's, or all in this rank's GPU's, on all
// ranks alike. The GPU is the current one of the thread that calls this, which also makes all calls; its libtorch must
// have been loaded. FailedPrecondition without NCCL.
//
// On a GPU a collective call is queued on the thread's current stream, so its `wait` returns at once and what is queued
// later sees the result. Messages have a stream for each group, since one that is not awaited yet must hold back
// nothing else: the current stream goes on until their `wait`. A barrier waits, on the host, until the GPU has done all
// that was queued on the current stream, and then for the others: whoever reads values on the host after it does not
// hang in a copy when a rank is missing. Buffers stay until the GPU is done with them: give them back by the stream's
// order.
//
// `abort` of a group ends all groups of the rank, their queued calls too; it returns at once and may be called from any
// thread. `host` outlives this, and this its groups.
absl::StatusOr<std::unique_ptr<Communicator>> make_nccl_communicator(Communicator& host);

}  // namespace parvl
