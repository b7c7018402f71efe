// What a fleet engine remembers. Only its own sources include it.
#pragma once

#include <optional>
#include <string>

#include "parvl/serve/pools/fleet_engine.h"
#include "parvl/serve/pools/stream_server.h"

namespace parvl {

// A request, and what of its answer was given out.
struct FleetEngine::Live {
  EngineRequest request;
  GenerateResult result;
  double arrival_s = 0, first_token_s = 0;
  bool has_end = false;  // an attempt has told of its counts
};

// What is known of an instance's process.
struct FleetEngine::Link {
  std::optional<StreamId> stream;
  int64_t epoch = 0, pid = 0;
  std::string device;
  EngineStats counts;
  absl::Status refusal;  // why it would not take on its modules, when it would not
};

}  // namespace parvl
