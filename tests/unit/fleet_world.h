// For tests of a fleet: processes and clients that do as they are told, and break as the test says.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "parvl/elastic/fleet_record.h"

namespace parvl {

using Order = InstanceAction::Kind;
using Do = RequestAction::Kind;
using Said = InstanceEvent::Kind;
using Tell = RequestEvent::Kind;
using State = InstanceState;

inline FleetSettings two_pools() {
  FleetSettings out;
  out.pools = {{.name = "encoder-pool", .instances = 2, .encodes = true, .generates = false},
               {.name = "llm-pool", .instances = 2, .encodes = false, .generates = true}};
  return out;
}

// Prompts have instances of their own; images, if `encoders`, too.
inline FleetSettings halves(bool encoders) {
  FleetSettings out;
  if (encoders) out.pools.push_back({.name = "encoder-pool", .instances = 2, .encodes = true, .generates = false});
  out.pools.push_back({.name = "prefill-pool", .instances = 2, .encodes = !encoders, .hands_over = true});
  out.pools.push_back(
      {.name = "decode-pool", .instances = 2, .encodes = false, .generates = false, .takes_over = true});
  return out;
}

class World {
 public:
  explicit World(const FleetSettings& of)
      : settings(of), fleet(settings, [this](std::string_view line) { record += line; }) {
    take(fleet.start(now));
  }

  struct Process {
    int64_t epoch = 0;
    bool alive = false, added = false;
    int64_t adds = 0;                                        // the number of the last order to take the encoder on
    std::map<std::pair<int64_t, int>, int64_t> generations;  // request and attempt → next token
    std::set<std::tuple<int64_t, size_t, int>> encodings, held;
    std::set<std::pair<int64_t, int>> kv;  // of attempts that were handed over
    std::vector<Order> orders;
  };
  struct Client {
    int64_t delivered = 0;
    int ends = 0;
    absl::Status status;
  };

  void take(const Fleet::Actions& actions) {
    for (const FleetAction& action : actions) {
      if (const auto* order = std::get_if<InstanceOrder>(&action)) {
        obey(*order);
      } else {
        obey(std::get<RequestOrder>(action));
      }
    }
  }

  void say(InstanceId id, Said kind) {
    Process& process = processes[id.value];
    if (!process.alive) return;
    if (kind == Said::kAdded) process.added = true;
    InstanceEvent event = {.kind = kind, .at_s = now, .epoch = process.epoch};
    if (kind == Said::kAdded || kind == Said::kAddRefused) event.number = process.adds;
    take(kind == Said::kLoaded ? fleet.loaded(id, event, {4, 1000}) : fleet.instance(id, event));
  }
  void open(InstanceId id) {
    for (const Said kind : {Said::kHello, Said::kLoaded, Said::kWarmed}) say(id, kind);
  }
  void open_all() {
    for (const InstanceView& one : fleet.fleet().instances()) open(one.id);
  }
  // Of the same size, one after the other, in the process's first epoch.
  void take_steps(InstanceId id, int count, double seconds, StepLane lane = StepLane::kBackbone) {
    for (int i = 0; i < count; ++i) {
      take(fleet.step_began(id, 1, {lane, 16}, now));
      take(fleet.step_ended(id, 1, {lane, 16, seconds}, now));
    }
  }
  void die(InstanceId id) {
    Process& process = processes[id.value];
    if (!process.alive) return;
    const int64_t epoch = process.epoch;
    process = {.epoch = epoch};
    take(fleet.instance(id, {.kind = Said::kExited, .at_s = now, .epoch = epoch}));
  }
  void pass(double seconds) {
    const double until = now + seconds;
    while (fleet.fleet().next_tick_s() <= until) {
      now = std::max(now, fleet.fleet().next_tick_s());
      for (auto& [id, process] : processes) say(InstanceId{id}, Said::kAlive);  // whoever lives is heard of
      take(fleet.tick(now));
    }
    now = until;
  }
  void arrive(int64_t id, size_t items, int64_t tokens);
  // It takes on what it was told to, or says that it cannot.
  void add(InstanceId id, bool can);
  // One piece of work of this instance is done.
  void work(InstanceId id);

  const FleetSettings settings;
  std::string record;
  RecordedFleet fleet;
  double now = 0;
  std::map<int64_t, Process> processes;
  std::map<int64_t, Client> clients;
  std::map<int64_t, int64_t> lengths;

 private:
  void obey(const InstanceOrder& order) {
    Process& process = processes[order.instance.value];
    if (order.action.kind == Order::kStart) {
      process = {.epoch = order.action.epoch, .alive = true};
    } else if (order.action.kind == Order::kKill) {
      process = {.epoch = order.action.epoch};
    } else if (order.action.kind == Order::kGiveBack) {
      EXPECT_TRUE(process.encodings.empty() && process.held.empty()) << "it is used";
      process.added = false;
    } else if (order.action.kind == Order::kAdd) {
      process.adds = order.action.number;
    }
    process.orders.push_back(order.action.kind);
  }

  void obey(const RequestOrder& order);
};

}  // namespace parvl
