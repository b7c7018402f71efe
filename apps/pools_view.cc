#include "apps/pools_view.h"

#include "parvl/serve/pools/fleet_engine.h"

namespace parvl {

PoolsView::PoolsView(const PlacementPlan& plan) {
  for (const PoolPlan& pool : plan.pools) {
    PoolInfo info;
    info.name = pool.name;
    info.role = std::string(kRoleNames[static_cast<size_t>(pool.role)]);
    info.device = pool.device;
    info.devices = pool.devices;
    info.takes_requests = pool.role == PoolRole::kLlm || pool.role == PoolRole::kPrefill;
    for (const PlacedModule& placed : pool.modules) {
      info.modules.emplace_back(kModuleNames[static_cast<size_t>(placed.module)]);
    }
    if (pool.role == PoolRole::kEncode) encoder_ = info.modules;
    pools_.push_back(std::move(info));
    devices_.push_back(pool.devices_an_instance);
  }
}

void PoolsView::show(FleetEngine* fleet) {
  std::lock_guard lock(mutex_);
  fleet_ = fleet;
}

std::vector<InstanceInfo> PoolsView::instances() const {
  std::lock_guard lock(mutex_);
  std::vector<InstanceInfo> out;
  if (fleet_ == nullptr) return out;
  for (const InstanceStatus& instance : fleet_->instances()) {
    InstanceInfo info;
    info.id = instance.id.value;
    info.epoch = instance.epoch;
    info.pids = instance.pids;
    info.pool = instance.pool;
    info.devices = devices_[instance.pool];
    info.device = instance.device;
    if (instance.added == AddedEncoder::kEncodes) info.added = encoder_;
    info.state = instance.state;
    info.running = instance.running;
    info.waiting = instance.stats.waiting;
    info.failures = instance.failures;
    info.stale = instance.stale;
    info.reason = instance.reason;
    info.stats = instance.stats;
    out.push_back(std::move(info));
  }
  return out;
}

std::vector<EngineStats> PoolsView::stats() const {
  std::lock_guard lock(mutex_);
  return fleet_ == nullptr ? std::vector<EngineStats>() : fleet_->stats_by_pool();
}

FleetView::Parked PoolsView::parked() const {
  std::lock_guard lock(mutex_);
  return fleet_ == nullptr ? Parked{} : Parked{fleet_->parked(true), fleet_->parked(false)};
}

absl::Status PoolsView::drain(int64_t instance) {
  std::lock_guard lock(mutex_);
  const auto all = fleet_ == nullptr ? std::vector<InstanceStatus>() : fleet_->instances();
  for (const InstanceStatus& one : all) {
    if (one.id.value != instance) continue;
    if (one.state == InstanceState::kDraining || one.state == InstanceState::kGone) {
      return absl::FailedPreconditionError(absl::StrCat(
          "instance ", instance, " is ", std::string(kInstanceStateNames[static_cast<size_t>(one.state)]), " already"));
    }
    fleet_->drain(one.id);
    return absl::OkStatus();
  }
  return absl::NotFoundError(absl::StrCat("there is no instance ", instance, "; `parvl ctl status` lists them"));
}

}  // namespace parvl
