// Whether a schedule is right. Pure; every schedule passes it before a rank begins a step by it.
#pragma once

#include "parvl/plan/pipeline/schedule.h"

namespace parvl {

// OK when all ranks come to their end though every message is a rendezvous: a send is done only when its receiver waits
// for it, messages between two ranks are taken in order, and a rank does its list in order. What ends so ends also
// where sends are buffered or posted, since then ranks wait for less. Internal, with the circle of waits in words.
absl::Status check_progress(const PipelineSchedule& schedule);

// OK when each rank does what the shape asks of it, everything once, nothing else, nothing before what it needs (a
// forward its input, a backward its forward and gradient, a release all of them), and holds no more micro batches at
// once than it states. Internal, naming rank and action.
absl::Status check_actions(const PipelineSchedule& schedule);

// Both.
absl::Status check_schedule(const PipelineSchedule& schedule);

}  // namespace parvl
