// What must hold of a replayed record, whatever was in it.
#pragma once

#include "parvl/sched/record.h"
#include "tests/fuzz/fuzz.h"

inline void require_good_report(const absl::StatusOr<parvl::ReplayReport>& report) {
  if (!report.ok()) {
    require_good_message(std::string(report.status().message()));
    FUZZ_REQUIRE(absl::IsInvalidArgument(report.status()));
  } else {
    FUZZ_REQUIRE(report->differing_line >= 0);
    FUZZ_REQUIRE((report->differing_line == 0) == (report->recorded.empty() && report->replayed.empty()));
  }
}

// Of records of a dozen runs that chance drives.
inline std::vector<std::string> record_seeds(std::string (*random_record)(uint64_t seed)) {
  std::vector<std::string> seeds;
  for (uint64_t seed = 1; seed <= 12; ++seed) seeds.push_back(random_record(seed));
  return seeds;
}
