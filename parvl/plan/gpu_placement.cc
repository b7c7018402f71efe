#include "parvl/plan/gpu_placement.h"

#include <absl/strings/str_join.h>

namespace parvl {

absl::StatusOr<GpuPlacement> place_on_gpus(const std::vector<const PoolPlan*>& pools,
                                           const std::vector<std::string>& gpus) {
  int64_t needed = 0;
  std::vector<std::string> needs;
  for (const PoolPlan* pool : pools) {
    needed += pool->instances * pool->devices_an_instance;
    needs.push_back(absl::StrCat(pool->name, " ", pool->instances, " × ", pool->devices_an_instance));
  }
  const auto count = static_cast<int64_t>(gpus.size());
  if (needed > count) {
    return invalid("the pools need ", needed, needed == 1 ? " GPU (" : " GPUs (", absl::StrJoin(needs, ", "),
                   "), and this machine has ", count,
                   "; give them fewer replicas or devices, or compute a class on the CPU: --device-map CLASS=cpu");
  }
  GpuPlacement out;
  auto next = gpus.begin();
  for (const PoolPlan* pool : pools) {
    for (int64_t i = 0; i < pool->instances; ++i) {
      const auto end = next + pool->devices_an_instance;
      out[pool->name].emplace_back(next, end);
      next = end;
    }
  }
  return out;
}

}  // namespace parvl
