// All instances of a server and all requests on them: who does what, and what becomes of it when one is lost. Pure:
// events with times in, actions out. The gateway carries them out on processes, the simulator on a clock of its own.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parvl/elastic/fleet_types.h"
#include "parvl/elastic/prefix_index.h"

namespace parvl {

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
  // A step begins; its instance counts as hung when it does not end in time.
  Actions step_began(InstanceId id, int64_t epoch, const FleetStep& step, double at_s);
  Actions step_ended(InstanceId id, int64_t epoch, const FleetStep& step, double at_s);
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
  // OK when any instance is open that generates, and where they hand over what they begin, any that goes on; else
  // likewise.
  absl::Status can_generate() const;
  // Likewise that encodes, or can soon, and not too many requests wait for it.
  absl::Status can_encode(double at_s) const;
  // OK while any can generate so, or may come to: one that starts, or is started again, does; else likewise.
  absl::Status will_generate() const;
  size_t requests() const { return requests_.size(); }
  // Pieces of their work that wait for an instance: images to be encoded, or generations.
  int64_t parked(bool encodings) const;

 private:
  struct Instance;
  struct Request;
  struct Parked {
    RequestId request;
    RequestAction action;  // kPlaceEncoding, kPlaceGeneration or kPlaceDecoding
    double since_s;
    bool encodes() const { return action.kind == RequestAction::Kind::kPlaceEncoding; }
  };

  void carry_out(Instance& instance, const std::vector<InstanceAction>& actions, double at_s, Actions& out);
  void carry_out(RequestId id, std::vector<RequestAction> actions, double at_s, Actions& out);
  // What follows at once, of an action that asks for a place.
  std::optional<RequestEvent> apply(RequestId id, Request& request, const RequestAction& action, double at_s,
                                    Actions& out);
  std::optional<RequestEvent> place(RequestId id, Request& request, const RequestAction& action, double at_s);
  static bool FleetPool::*asked(const RequestAction& action);
  bool has_halves() const;
  bool is_coming(bool FleetPool::*does) const;
  bool is_coming(const RequestAction& action) const;
  RequestEvent placed(const RequestAction& action, InstanceId chosen) const;
  std::optional<InstanceId> choose(const Request& request, const RequestAction& action) const;
  void move_all(Instance& instance, double at_s, Actions& out);
  void place_parked(double at_s, Actions& out);
  template <typename Which>
  void end_parked(Which which, double at_s, Actions& out);
  bool is_last(const Instance& instance, bool FleetPool::*does) const;
  bool is_last(const Instance& instance) const;
  bool is_awaited(const Instance& instance) const;
  void settle(double at_s, Actions& out);
  bool encodes(const Instance& instance) const;
  bool any_encodes() const;
  bool may_add(const Instance& instance) const;
  double next_add_s() const;
  bool is_crowded(std::optional<RequestId> one) const;
  absl::Status crowded() const;
  void take_added(Instance& instance, const InstanceEvent& event, Actions& out);
  void add_encoder(double at_s, Actions& out);
  void give_back(double at_s, Actions& out);
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
