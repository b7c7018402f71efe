// The instances behind a server as its admin port and /metrics show them. Whoever starts them implements it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/elastic/instance_lifecycle.h"
#include "parvl/exec/engine.h"

namespace parvl {

// As the allocation has it.
struct PoolInfo {
  std::string name;
  std::string role;    // encode | llm | prefill | decode
  std::string device;  // class
  int64_t devices = 0;
  std::vector<std::string> modules;  // of each of its instances
  bool takes_requests = true;        // the gateway's line is for it; else work comes from other pools
};

// As it is now.
struct InstanceInfo {
  int64_t id = 0, epoch = 0;
  std::vector<int64_t> pids;  // of its processes; empty: none yet
  size_t pool = 0;
  int64_t devices = 1;
  std::string device;              // what it computes on, once it has said so
  std::vector<std::string> added;  // modules, beside those of its pool
  InstanceState state = InstanceState::kGone;
  int64_t running = 0, waiting = 0;
  int64_t failures = 0;  // since the start of the server
  int64_t stale = 0;     // words of past epochs, which had no effect
  std::string reason;    // of the last failure
  EngineStats stats;     // of this epoch
};

// Any thread.
class FleetView {
 public:
  virtual ~FleetView() = default;
  virtual const std::vector<PoolInfo>& pools() const = 0;
  virtual std::vector<InstanceInfo> instances() const = 0;  // by id; empty before the first has been started
  // By pool, of all its instances together, those that are gone included; empty before the engine has started.
  virtual std::vector<EngineStats> stats() const = 0;
  // Pieces of requests that wait for an instance to come back: images for one that encodes, and generations.
  struct Parked {
    int64_t encodings = 0, generations = 0;
  };
  virtual Parked parked() const { return {}; }
  // The instance takes no new requests, and ends when those it has are done or moved. NotFound when there is none;
  // FailedPrecondition when it is draining or gone already.
  virtual absl::Status drain(int64_t instance) = 0;
};

}  // namespace parvl
