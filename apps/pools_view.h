// The instances of `parvl serve --config` as the admin port shows them: the plan's pools, and what the engine says.
#pragma once

#include <mutex>
#include <vector>

#include "parvl/plan/placement.h"
#include "parvl/serve/fleet_view.h"

namespace parvl {

class FleetEngine;

class PoolsView : public FleetView {
 public:
  explicit PoolsView(const PlacementPlan& plan);
  // Any thread. The engine must live until this is called with nullptr.
  void show(FleetEngine* fleet);

  const std::vector<PoolInfo>& pools() const override { return pools_; }
  std::vector<InstanceInfo> instances() const override;
  std::vector<EngineStats> stats() const override;
  Parked parked() const override;
  absl::Status drain(int64_t instance) override;

 private:
  std::vector<PoolInfo> pools_;
  std::vector<std::string> encoder_;  // modules of the pool that encodes and does nothing else
  std::vector<int64_t> devices_;      // of an instance of each pool
  mutable std::mutex mutex_;
  FleetEngine* fleet_ = nullptr;
};

}  // namespace parvl
