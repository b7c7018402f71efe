// A scheduler that can write down what it was told and what it decided, and the check that the same events give the
// same decisions again. A record is a text of JSON lines: the configuration, then events and decisions as they came. It
// holds token ids, so it is as confidential as the prompts.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "parvl/sched/scheduler.h"

namespace parvl {

inline constexpr int kRecordFormat = 4;

class RecordedScheduler {
 public:
  using Write = std::function<void(std::string_view line)>;  // a line with its line break
  // Without `write` nothing is recorded.
  RecordedScheduler(const SchedulerConfig& config, Write write);

  // As those of Scheduler.
  absl::Status add(SchedRequest request, double now);
  void finish(RequestId id);
  SchedulerOutput schedule(double now);
  void commit(const StepTokens& tokens);
  std::vector<RequestId> commit_failed(StepId step);
  std::vector<RequestId> commit_encode(SlotId slot, bool ok);
  void commit_kv(RequestId id, bool ok);
  const Scheduler& scheduler() const { return scheduler_; }

 private:
  Scheduler scheduler_;
  Write write_;
};

struct ReplayReport {
  int64_t events = 0;
  int64_t decisions = 0;
  bool cut = false;                // the last line was not written whole, as when the process died; it was left out
  int64_t differing_line = 0;      // the first line whose decision differs, counted from 1; 0: none
  std::string recorded, replayed;  // that decision, both ways
};
// Feeds a record's events to a new scheduler. InvalidArgument naming the line for a text that is no record, or whose
// events no engine could have told.
absl::StatusOr<ReplayReport> replay(std::string_view record);

}  // namespace parvl
