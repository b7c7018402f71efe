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
  int64_t pid = 0;            // 0: none yet
  std::vector<int64_t> pids;  // of its ranks, `pid` first, once it has loaded and there are several
  std::string device;
  int64_t waiting = 0;   // of its engine
  EngineStats stats;     // of its engine, since the start of this epoch
  absl::Status refusal;  // why it would not take on its modules, when it would not
};

}  // namespace parvl
