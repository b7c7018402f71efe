// A fleet that can write down what it was told and what it decided, and the check that the same events give the same
// decisions again. A record is a text of JSON lines: the settings, then each event, and after it what was decided,
// where anything was. It holds no content: no tokens, but hashes of prompts and images.
#pragma once

#include <functional>
#include <string_view>

#include "parvl/elastic/fleet.h"
#include "parvl/sched/record.h"

namespace parvl {

inline constexpr int kFleetRecordFormat = 4;

class RecordedFleet {
 public:
  using Write = std::function<void(std::string_view line)>;  // a line with its line break
  using Actions = Fleet::Actions;
  // Without `write` nothing is recorded.
  RecordedFleet(const FleetSettings& settings, Write write);

  // As those of Fleet.
  Actions start(double at_s);
  Actions instance(InstanceId id, const InstanceEvent& event);
  Actions loaded(InstanceId id, const InstanceEvent& event, const InstanceRoom& room);
  Actions step_began(InstanceId id, int64_t epoch, const FleetStep& step, double at_s);
  Actions step_ended(InstanceId id, int64_t epoch, const FleetStep& step, double at_s);
  void report_free(InstanceId id, int64_t epoch, int64_t free_kv_tokens);
  Actions arrive(RequestId id, const FleetRequest& request, double at_s);
  Actions request(RequestId id, const RequestEvent& event, double at_s);
  Actions tick(double at_s);
  const Fleet& fleet() const { return fleet_; }

 private:
  Actions told(Actions actions) const;

  Fleet fleet_;
  Write write_;
};

// Whether a text begins as a fleet's record does; else it may be a scheduler's.
bool is_fleet_record(std::string_view record);
// Feeds a record's events to a new fleet. InvalidArgument naming the line for a text that is no record, or whose events
// no gateway could have told.
absl::StatusOr<ReplayReport> replay_fleet(std::string_view record);

}  // namespace parvl
