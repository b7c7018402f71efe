// What the gateway's engine is made of.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "parvl/elastic/fleet_record.h"
#include "parvl/exec/engine_load.h"

namespace parvl {

class FleetEngine;

struct FleetOptions {
  FleetSettings fleet;
  std::string model_dir;
  EngineFront front;                         // of that directory
  RecordedFleet::Write record;               // null: nothing is recorded
  std::vector<EngineOptions> engines;        // of the instances of each pool
  std::string token;                         // of this run; whoever shows it is an instance
  int64_t pixel_bytes = int64_t{1} << 30;    // of memory in which images wait for their instances to fetch them
  int64_t feature_bytes = int64_t{1} << 30;  // likewise encoder output, on each instance that encodes
  std::function<void(FleetEngine*)> watch;   // told of the engine before its start, of null before its end; may be null
};

}  // namespace parvl
