// How a schedule runs, without running it: whether it ends, and when each action begins and ends. Pure.
//
// One execution stands for all. Every rank does its list in order and never chooses; a message or collective needs
// ranks that each wait at that very action, so nothing but its own completion can make it impossible again: two steps
// that are possible at once are possible in either order and lead to the same state. Hence (the diamond property) all
// executions that go on until nothing is possible end in the same state, and running greedily decides for every order
// that threads, networks and loads may bring about. (tests/unit/plan_schedule_check_test.cc explores all of them.)
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "parvl/plan/pipeline/schedule.h"

namespace parvl {

// What a rank waits for. There is one channel from each rank to each other, in order.
enum class Sends {
  kRendezvous,  // every message by itself, and a send is done only when it was received: no backend waits for more
  // Messages that stand together are posted at once, and the rank waits for those it receives only; but a send is not
  // posted before the one ahead of it in its channel was received, so that a rank that waits for nobody (its stage is
  // frozen) does not fill the memory with what it sends.
  kPosted,
};

// Seconds that an action takes by itself: a computation; a message or collective once all who take part are there
// (asked of the sender, and of each rank of a collective). 0 for a receive and a release, as a rule.
using ActionSeconds = std::function<double(int64_t rank, const Action& action)>;

struct ActionTime {
  double begin = 0;  // when the rank comes to it
  double end = 0;    // when it is done; of a message: received
};

// Seconds from the step's beginning.
struct PipelineTimes {
  std::vector<std::vector<ActionTime>> actions;  // of each rank, as in the schedule
  std::vector<double> busy;                      // of each rank: what it computes
  double makespan = 0;
  // The share of the ranks' time in which they do not compute.
  double bubble_share() const;
};

// Internal, naming ranks and actions: a schedule that stops before its end (with the circle of waits), or a channel
// whose sender and receiver do not mean the same message.
absl::StatusOr<PipelineTimes> predict(const PipelineSchedule& schedule, const ActionSeconds& seconds,
                                      Sends sends = Sends::kPosted);

}  // namespace parvl
