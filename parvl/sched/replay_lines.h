// The walk through a record's lines that every kind of record shares: events are told to the deciding code, and what it
// decides is compared with what was recorded.
#pragma once

#include <functional>
#include <string_view>

#include "parvl/base/json.h"
#include "parvl/sched/record.h"

namespace parvl {

// The deciding code of a record, by what its lines hold. It throws or returns what is wrong with a line, and writes
// what it decides as it would into a record; lines of other kinds that it writes are left out.
struct ReplayedCode {
  std::function<absl::Status(const Json& settings, std::function<void(std::string_view line)> write)> begin;
  std::function<absl::Status(const Json& event)> tell;
};

// InvalidArgument naming the line for a text that is no record, or whose events nobody could have told.
absl::StatusOr<ReplayReport> replay_lines(std::string_view record, const ReplayedCode& code);

}  // namespace parvl
