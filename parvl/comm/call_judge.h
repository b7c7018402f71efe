// What ranks' reports of their calls prove to be wrong. Pure; a finding never depends on how old a report is.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "parvl/comm/call_report.h"

namespace parvl {

// Members of a group that have made different calls at the same place, or messages that were sent as one thing and
// awaited as another: InvalidArgument naming rank, call, shapes and place in the code of the first of a group. OK when
// there are none among the calls that are told of.
absl::Status find_mismatch(const RankReports& reports);

// Of ranks that all stand at the same place of the program and of whose calls something is known to differ: the first
// that does, as above, or a call that not all have made, or a message that was not awaited or not sent. Never OK.
absl::Status find_difference(const RankReports& reports);

// InvalidArgument when all `world` ranks wait in one and the same collective call of a group of all, and yet have made
// unlike numbers of calls in another group, or sent messages that were not awaited. Since a GPU's calls are only
// queued, such a rank waits in none of them but hangs in the next call that waits for the GPU. What is told of is how
// things were when each rank made that call, whatever the report's age.
absl::Status find_standstill(const RankReports& reports, int64_t world);

// Ranks that wait for each other in a circle, or for one that has left. A rank calls from one thread, so what it has
// not called while it waits it will not call before the wait is over; and its counts only grow. Hence reports of
// different moments prove it as well. Every call is held to wait for all who take part in it, also a send and a
// broadcast, as with the strictest backend: an order that only buffers let through is wrong too.
absl::Status find_deadlock(const RankReports& reports);

// The ranks without whose own call the wait of `report` cannot end; they have not made it, as far as is known.
std::vector<int64_t> awaited_ranks(const RankReport& report, const RankReports& reports);

// "group g, call 5 (all_reduce (sum) of 6 float32 at mlp)"
std::string describe(const std::string& group, const CallRecord& call);
// "rank 0 waits since 3.2 s in group g, call 5 (...)", or its last call, or that nothing was heard of it.
std::string position(int64_t rank, const RankReports& reports);
// A line each: where all ranks are, and the calls that this rank's report tells of: "  call 5: all_reduce (sum) of 6
// float32, 0.310 s ago, under way".
std::string situation(const RankReport& mine, RankReports others, int64_t world, int64_t now_ns);
// "rank 3", "ranks 0, 2"
std::string rank_list(const std::vector<int64_t>& ranks);

}  // namespace parvl
