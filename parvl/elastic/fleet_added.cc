// The vision encoder beside what an instance holds: images go on while the instances that were to encode them are gone.
#include <absl/strings/str_cat.h>

#include <algorithm>
#include <set>

#include "parvl/elastic/fleet.h"
#include "parvl/elastic/fleet_parts.h"

namespace parvl {

using Order = InstanceAction::Kind;

bool Fleet::encodes(const Instance& instance) const {
  return instance.open && (pool_of(instance).encodes || instance.added == AddedEncoder::kEncodes);
}

bool Fleet::any_encodes() const {
  return std::any_of(instances_.begin(), instances_.end(), [this](const auto& one) { return encodes(*one); });
}

// Whether it could take the encoder on, sooner or later.
bool Fleet::may_add(const Instance& instance) const {
  const FleetPool& pool = pool_of(instance);
  return instance.open && pool.generates && !pool.encodes;
}

int64_t Fleet::parked(bool encodings) const {
  return std::count_if(parked_.begin(), parked_.end(),
                       [encodings](const Parked& parked) { return parked.encodes() == encodings; });
}

// Whether no more requests may wait for an encoder; `one` does not count.
bool Fleet::is_crowded(std::optional<RequestId> one) const {
  std::set<RequestId> waiting;
  for (const Parked& parked : parked_) {
    if (parked.encodes() && parked.request != one) waiting.insert(parked.request);
  }
  const auto most = static_cast<int64_t>(settings_.waiting_share * static_cast<double>(capacity()));
  return static_cast<int64_t>(waiting.size()) >= std::max<int64_t>(1, most);
}

absl::Status Fleet::crowded() const {
  return absl::UnavailableError(
      absl::StrCat("many requests wait for an encoder already, and ", missing(&FleetPool::encodes).message()));
}

absl::Status Fleet::can_encode(double at_s) const {
  if (any_encodes()) return absl::OkStatus();
  if (is_crowded({})) return crowded();
  const bool soon = std::any_of(instances_.begin(), instances_.end(), [&](const auto& one) {
    return one->added == AddedEncoder::kAdding || (may_add(*one) && at_s >= one->not_before_s);
  });
  return soon ? absl::OkStatus() : missing(&FleetPool::encodes);
}

void Fleet::take_added(Instance& instance, const InstanceEvent& event, Actions& out) {
  if (event.epoch != instance.life.epoch() || instance.added != AddedEncoder::kAdding) return;
  if (event.number != instance.adds) return;  // of one that was given back meanwhile
  if (event.kind == InstanceEvent::Kind::kAdded) {
    instance.added = AddedEncoder::kEncodes;
    place_parked(event.at_s, out);
  } else if (event.kind == InstanceEvent::Kind::kAddRefused) {
    instance.added = AddedEncoder::kNone;
    instance.not_before_s = event.at_s + settings_.add_again_s;
  }
}

// When somebody is asked to take the encoder on: one at a time, since each costs memory.
double Fleet::next_add_s() const {
  double waiting_since_s = Instance::kNever, able_s = Instance::kNever;
  for (const Parked& parked : parked_) {
    if (parked.encodes()) waiting_since_s = std::min(waiting_since_s, parked.since_s);
  }
  if (waiting_since_s == Instance::kNever) return Instance::kNever;
  for (const auto& instance : instances_) {
    if (encodes(*instance) || instance->added == AddedEncoder::kAdding) return Instance::kNever;
    if (may_add(*instance)) able_s = std::min(able_s, instance->not_before_s);
  }
  return std::max(waiting_since_s + settings_.add_after_s, able_s);
}

void Fleet::add_encoder(double at_s, Actions& out) {
  if (at_s < next_add_s()) return;
  std::vector<InstanceLoad> loads;
  for (const auto& instance : instances_) {
    if (!may_add(*instance) || at_s < instance->not_before_s) continue;
    InstanceLoad load;
    load.id = instance->id;
    load.open = true;
    load.pending_tokens = instance->pending_tokens;
    load.running = instance->generations;
    load.max_running = instance->room.max_running;
    loads.push_back(load);
  }
  const auto chosen = route_generation(loads, {}, settings_.costs);
  if (!chosen.has_value()) return;
  Instance& instance = at(*chosen);
  instance.added = AddedEncoder::kAdding;
  instance.added_until_s = at_s + settings_.instance.load_s + settings_.instance.warm_s;
  out.push_back(InstanceOrder{*chosen, {Order::kAdd, instance.life.epoch(), ++instance.adds}});
}

// Because a pool encodes again, or because it did not come in time: what comes after all goes back at once.
void Fleet::give_back(double at_s, Actions& out) {
  const bool pool_encodes = std::any_of(instances_.begin(), instances_.end(),
                                        [this](const auto& one) { return one->open && pool_of(*one).encodes; });
  for (const auto& instance : instances_) {
    const bool late = instance->added == AddedEncoder::kAdding && at_s >= instance->added_until_s;
    const bool unused =
        instance->added == AddedEncoder::kEncodes && pool_encodes && instance->encodings + instance->held == 0;
    instance->unused_since_s = unused ? std::min(instance->unused_since_s, at_s) : Instance::kNever;
    if (!late && at_s < instance->unused_since_s + settings_.add_idle_s) continue;
    instance->added = AddedEncoder::kNone;
    instance->unused_since_s = Instance::kNever;
    if (late) instance->not_before_s = at_s + settings_.add_again_s;
    out.push_back(InstanceOrder{instance->id, {Order::kGiveBack, instance->life.epoch()}});
  }
}

}  // namespace parvl
