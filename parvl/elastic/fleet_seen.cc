// How a fleet is seen from outside: its instances, what they can take, and what is missing.
#include <absl/strings/str_cat.h>

#include <algorithm>

#include "parvl/elastic/fleet.h"
#include "parvl/elastic/fleet_parts.h"

namespace parvl {

InstanceView Fleet::instance(InstanceId id) const {
  const Instance& instance = *instances_[static_cast<size_t>(id.value)];
  InstanceView view;
  view.id = id;
  view.pool = instance.pool;
  view.epoch = instance.life.epoch();
  view.state = instance.life.state();
  view.open = instance.open;
  view.added = instance.added;
  view.running = instance.generations + instance.encodings;
  view.failures = instance.life.failures();
  view.stale = instance.life.stale_events();
  view.reason = instance.life.reason();
  view.room = instance.room;
  return view;
}

std::vector<InstanceView> Fleet::instances() const {
  std::vector<InstanceView> out;
  for (const auto& instance : instances_) out.push_back(this->instance(instance->id));
  return out;
}

int64_t Fleet::capacity() const {
  int64_t total = 0;
  for (const auto& instance : instances_) {
    const FleetPool& pool = pool_of(*instance);
    // Of an answer's two halves the second is where it stays.
    if (instance->open && (pool.takes_over || (pool.generates && !pool.hands_over)))
      total += instance->room.max_running;
  }
  return total;
}

std::string Fleet::states_of(size_t pool) const {
  std::string out;
  for (const auto& instance : instances_) {
    if (instance->pool != pool) continue;
    const std::string_view state = kInstanceStateNames[static_cast<size_t>(instance->life.state())];
    const std::string& reason = instance->life.reason();
    absl::StrAppend(&out, out.empty() ? "" : "; ", "instance ", instance->id.value, " is ", std::string(state),
                    reason.empty() ? "" : " after it failed: ", reason);
  }
  return out;
}

absl::Status Fleet::missing(bool FleetPool::*does) const {
  std::string why;
  for (size_t pool = 0; pool < settings_.pools.size(); ++pool) {
    if (!(settings_.pools[pool].*does)) continue;
    for (const auto& instance : instances_) {
      if (instance->pool == pool && instance->open) return absl::OkStatus();
    }
    absl::StrAppend(&why, why.empty() ? "" : "; ", settings_.pools[pool].name, ": ", states_of(pool));
  }
  return absl::UnavailableError("no instance can take it (" + why + ")");
}

absl::Status Fleet::can_generate() const {
  const absl::Status begins = missing(&FleetPool::generates);
  return begins.ok() && has_halves() ? missing(&FleetPool::takes_over) : begins;
}

bool Fleet::has_halves() const {
  return std::any_of(settings_.pools.begin(), settings_.pools.end(),
                     [](const FleetPool& pool) { return pool.hands_over; });
}

// Whether any instance does it, or will once it has started.
bool Fleet::is_coming(bool FleetPool::*does) const {
  return std::any_of(instances_.begin(), instances_.end(), [&](const auto& instance) {
    const InstanceState state = instance->life.state();
    return pool_of(*instance).*does && state != InstanceState::kGone && state != InstanceState::kDraining;
  });
}

absl::Status Fleet::will_generate() const {
  if (!is_coming(&FleetPool::generates)) return missing(&FleetPool::generates);
  return has_halves() && !is_coming(&FleetPool::takes_over) ? missing(&FleetPool::takes_over) : absl::OkStatus();
}

absl::Status Fleet::health() const {
  for (size_t pool = 0; pool < settings_.pools.size(); ++pool) {
    const auto serves = [&](const auto& instance) { return instance->pool == pool && instance->open; };
    if (std::any_of(instances_.begin(), instances_.end(), serves)) continue;
    return absl::UnavailableError(
        absl::StrCat("pool ", settings_.pools[pool].name, " has no instance that is ready: ", states_of(pool)));
  }
  return absl::OkStatus();
}

}  // namespace parvl
