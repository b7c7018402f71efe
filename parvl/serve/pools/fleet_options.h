// What the gateway's engine is made of.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parvl/elastic/fleet_record.h"
#include "parvl/exec/engine_load.h"

namespace parvl {

class FleetEngine;
class PixelStore;

struct FleetOptions {
  FleetSettings fleet;
  std::string model_dir;
  std::string fingerprint;                   // of that directory when the server started, see base/fingerprint.h
  EngineFront front;                         // of that directory
  RecordedFleet::Write record;               // null: nothing is recorded
  std::vector<EngineOptions> engines;        // of the instances of each pool
  std::shared_ptr<PixelStore> pixels;        // where the images of all requests lie; its token is the run's
  int64_t feature_bytes = int64_t{1} << 30;  // of memory for encoder output, on each instance that encodes
  std::function<void(FleetEngine*)> watch;   // told of the engine before its start, of null before its end; may be null
};

}  // namespace parvl
