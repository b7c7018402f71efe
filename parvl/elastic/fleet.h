// All instances of a server and all requests on them: who does what, and what becomes of it when one is lost. Pure:
// events with times in, actions out. The gateway carries them out on processes, the simulator on a clock of its own.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "parvl/base/ids.h"
#include "parvl/elastic/instance_id.h"
#include "parvl/elastic/instance_lifecycle.h"
#include "parvl/elastic/prefix_index.h"
#include "parvl/elastic/request_lifecycle.h"
#include "parvl/elastic/router.h"
#include "parvl/elastic/step_deadline.h"

namespace parvl {

// Instances that are alike.
struct FleetPool {
  std::string name;
  int64_t instances = 1;
  bool encodes = true, generates = true;  // what may be asked of them
};

struct FleetSettings {
  std::vector<FleetPool> pools;
  InstanceLimits instance;
  StepDeadlineRule step;
  double first_step_s = 60;  // a step's limit while none has been seen
  double park_s = 60;        // how long work waits for an instance of its pool to come back
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

// As `parvl ctl status` shows it.
struct InstanceView {
  InstanceId id = {};
  size_t pool = 0;
  int64_t epoch = 0;
  InstanceState state = InstanceState::kGone;
  bool open = false;
  int64_t running = 0;     // generations and encodings there
  int64_t failures = 0;    // since the start of the server
  int64_t stale = 0;       // words of past epochs, which had no effect
  std::string reason;      // of the last failure
  InstanceRoom room = {};  // of this epoch, once it has loaded
};

// Not thread-safe. Times never go back.
class Fleet {
 public:
  using Actions = std::vector<FleetAction>;
  explicit Fleet(FleetSettings settings);
  ~Fleet();

  Actions start(double at_s);  // every instance; once, before all else
  // What an instance said or what happened to it. kStepBegan: use step_began().
  Actions instance(InstanceId id, const InstanceEvent& event);
  // `room`: with kLoaded.
  Actions loaded(InstanceId id, const InstanceEvent& event, const InstanceRoom& room);
  // A step of so many tokens (or patches) begins; its instance counts as hung when it does not end in time.
  Actions step_began(InstanceId id, int64_t epoch, int64_t size, double at_s);
  Actions step_ended(InstanceId id, int64_t epoch, int64_t size, double seconds, double at_s);
  // KV memory that is free there, evictable prefixes included.
  void report_free(InstanceId id, int64_t epoch, int64_t free_kv_tokens);

  // A request of a new id.
  Actions arrive(RequestId id, FleetRequest request, double at_s);
  // Of one that has ended: no effect.
  Actions request(RequestId id, const RequestEvent& event, double at_s);

  Actions tick(double at_s);
  double next_tick_s() const;  // when tick() will next have an effect if nothing else comes

  InstanceView instance(InstanceId id) const;
  std::vector<InstanceView> instances() const;  // by id
  // Generations that the open instances compute at once.
  int64_t capacity() const;
  // OK when every pool has an open instance; else Unavailable, naming the pool and why.
  absl::Status health() const;
  // OK when any instance is open that generates; else likewise.
  absl::Status can_generate() const;
  size_t requests() const { return requests_.size(); }
  size_t parked() const { return parked_.size(); }  // pieces of their work that wait for an instance

 private:
  struct Instance;
  struct Request;
  struct Parked {
    RequestId request;
    RequestAction action;  // kPlaceEncoding or kPlaceGeneration
    double until_s;
  };

  void carry_out(Instance& instance, const std::vector<InstanceAction>& actions, double at_s, Actions& out);
  void carry_out(RequestId id, std::vector<RequestAction> actions, double at_s, Actions& out);
  // What follows at once, of an action that asks for a place.
  std::optional<RequestEvent> apply(RequestId id, Request& request, const RequestAction& action, double at_s,
                                    Actions& out);
  std::optional<RequestEvent> place(RequestId id, Request& request, const RequestAction& action, double at_s);
  static bool FleetPool::*asked(const RequestAction& action);
  static RequestEvent placed(const RequestAction& action, InstanceId chosen);
  std::optional<InstanceId> choose(const Request& request, const RequestAction& action) const;
  void move_all(Instance& instance, double at_s, Actions& out);
  void place_parked(double at_s, Actions& out);
  void tell_idle(double at_s, Actions& out);
  std::string states_of(size_t pool) const;
  absl::Status missing(bool FleetPool::*does) const;  // OK when any instance is open that does it
  Instance& at(InstanceId id) { return *instances_[static_cast<size_t>(id.value)]; }
  const FleetPool& pool_of(const Instance& instance) const;

  const FleetSettings settings_;
  std::vector<std::unique_ptr<Instance>> instances_;  // by id
  std::map<RequestId, std::unique_ptr<Request>> requests_;
  std::vector<Parked> parked_;
};

}  // namespace parvl
