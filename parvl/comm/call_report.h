// Where a rank is in its groups' calls, as ranks tell each other.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "parvl/comm/call_log.h"

namespace parvl {

struct GroupReport {
  GroupSpec group;
  int64_t collectives = 0;              // made so far
  std::vector<int64_t> sent, received;  // messages so far, by member
  uint64_t hash = 0;                    // of all collectives
  std::vector<CallRecord> calls;        // the last, oldest first
};

// A call whose result a rank waits for.
struct WaitingCall {
  std::string group;
  CallRecord call;
  double seconds = 0;  // so far
};

// One moment of one rank.
struct RankReport {
  int64_t rank = 0;
  int64_t number = 0;  // of this rank's reports: one that grows is a sign of life
  bool has_left = false;
  std::optional<WaitingCall> waiting;
  std::vector<GroupReport> groups;

  const GroupReport* find(const std::string& group) const;
};

GroupReport report_of(const CallLog& log, size_t calls);
std::string to_text(const RankReport& report);
absl::StatusOr<RankReport> parse_report(const std::string& text);

// An error as ranks tell each other: "3 the message".
std::string to_text(const absl::Status& error);
absl::Status parse_status(const std::string& text);

// By rank in the world; none where a rank has not told.
using RankReports = std::map<int64_t, RankReport>;

}  // namespace parvl
