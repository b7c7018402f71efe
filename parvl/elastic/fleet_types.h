// What a fleet is made of, what it is asked for, what it orders and how it is seen. Plain data.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "parvl/base/ids.h"
#include "parvl/elastic/instance_id.h"
#include "parvl/elastic/instance_lifecycle.h"
#include "parvl/elastic/request_lifecycle.h"
#include "parvl/elastic/router.h"
#include "parvl/elastic/step_deadline.h"

namespace parvl {

// Instances that are alike.
struct FleetPool {
  std::string name;
  int64_t instances = 1;
  bool encodes = true, generates = true;  // what may be asked of them
  // Of a prefill pool: what its instances begin goes on on others. Of a decode pool: they go on with that.
  bool hands_over = false, takes_over = false;
};

struct FleetSettings {
  std::vector<FleetPool> pools;
  InstanceLimits instance;
  StepDeadlineRule step;
  double first_step_s = 60;  // a step's limit while none has been seen
  double park_s = 60;        // how long work waits for an instance of its pool to come back
  // While no instance of a pool encodes, one that generates takes the vision encoder on beside what it holds:
  double add_after_s = 5;   // once images have waited for so long, in which a pool's process may be back
  double add_again_s = 60;  // after it refused, or did not do it in time
  double add_idle_s = 60;   // so long unused, while a pool encodes again, and it is given back
  // New requests whose images find no encoder wait for one until there are so many, as a share of what the open
  // instances generate at once: they hold turns that others need. At least one may.
  double waiting_share = 0.5;
  RouterCosts costs;
  int64_t block_tokens = 16;     // a hash of a prompt's chain stands for so many
  size_t index_limit = 1 << 16;  // hashes remembered for each instance
};

// What an instance said it has room for, once it had loaded.
struct InstanceRoom {
  int64_t max_running = 1, kv_tokens = 0;
};

// What the choice of an instance for a request needs to know of it.
struct FleetRequest {
  RequestShape shape;
  GenerationNeeds needs;
  std::vector<uint64_t> chain;     // of its prompt, see PrefixIndex
  std::vector<int64_t> patches;    // of each item that is encoded on its own, as shape.items counts them
  std::vector<uint64_t> item_key;  // likewise: equal for equal images
};

struct InstanceOrder {
  InstanceId instance = {};
  InstanceAction action;
};
// Never to place something: that was done.
struct RequestOrder {
  RequestId request = {};
  RequestAction action;
};
using FleetAction = std::variant<InstanceOrder, RequestOrder>;

// A step of an instance, in tokens or patches.
struct FleetStep {
  StepLane lane = StepLane::kBackbone;
  int64_t size = 0;
  double seconds = 0;  // that it took, once it has ended
};

// The vision encoder beside what an instance of the plan holds.
enum class AddedEncoder { kNone, kAdding, kEncodes };

// As `parvl ctl status` shows it.
struct InstanceView {
  InstanceId id = {};
  size_t pool = 0;
  int64_t epoch = 0;
  InstanceState state = InstanceState::kGone;
  bool open = false;
  AddedEncoder added = AddedEncoder::kNone;
  int64_t running = 0;     // generations and encodings there
  int64_t failures = 0;    // since the start of the server
  int64_t stale = 0;       // words of past epochs, which had no effect
  std::string reason;      // of the last failure
  InstanceRoom room = {};  // of this epoch, once it has loaded
};

}  // namespace parvl
