// One instance as `parvl ctl status` shows it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/elastic/fleet.h"
#include "parvl/exec/engine.h"

namespace parvl {

struct InstanceStatus : InstanceView {
  std::vector<int64_t> pids;  // of its ranks, the one that speaks first, and alone before all have come
  std::string device;
  EngineStats stats;     // of its engine, since the start of this epoch
  absl::Status refusal;  // why it would not take on its modules, when it would not
};

}  // namespace parvl
