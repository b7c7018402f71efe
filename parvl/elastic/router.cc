#include "parvl/elastic/router.h"

#include <algorithm>
#include <tuple>

namespace parvl {
namespace {

// The open one with the least of `rank`, then of id.
template <typename Rank>
std::optional<InstanceId> least(std::span<const InstanceLoad> instances, Rank rank) {
  const InstanceLoad* best = nullptr;
  for (const InstanceLoad& instance : instances) {
    if (!instance.open) continue;
    if (best == nullptr || std::tuple(rank(instance), instance.id) < std::tuple(rank(*best), best->id))
      best = &instance;
  }
  return best == nullptr ? std::nullopt : std::optional(best->id);
}

}  // namespace

std::optional<InstanceId> route_generation(std::span<const InstanceLoad> instances, const GenerationNeeds& needs,
                                           const RouterCosts& costs) {
  return least(instances, [&](const InstanceLoad& instance) {
    const int64_t cached = std::min(instance.cached_tokens, needs.prompt_tokens);
    const bool waits = instance.running >= instance.max_running || instance.free_kv_tokens + cached < needs.kv_tokens;
    const auto own = static_cast<double>(needs.prompt_tokens - cached);
    const double pauses = costs.pause * own * static_cast<double>(instance.decoding);
    const double seconds = costs.token_s * (static_cast<double>(instance.pending_tokens) + own + pauses) +
                           costs.patch_s * static_cast<double>(instance.pending_patches) +
                           costs.running_s * static_cast<double>(instance.running);
    return std::tuple(waits, seconds);
  });
}

std::optional<InstanceId> route_decoding(std::span<const InstanceLoad> instances, const GenerationNeeds& needs) {
  return least(instances, [&](const InstanceLoad& instance) {
    const bool waits = instance.running >= instance.max_running || instance.free_kv_tokens < needs.kv_tokens;
    return std::tuple(waits, instance.running, -instance.free_kv_tokens);
  });
}

std::optional<InstanceId> route_encoding(std::span<const InstanceLoad> instances, int64_t patches,
                                         const RouterCosts& costs) {
  return least(instances, [&](const InstanceLoad& instance) {
    const int64_t before = instance.pending_patches + (instance.has_output ? 0 : patches);
    const double beside = costs.token_s * static_cast<double>(instance.pending_tokens) +
                          costs.running_s * static_cast<double>(instance.running);
    return instance.has_output ? 0.0 : costs.patch_s * static_cast<double>(before) + beside;
  });
}

}  // namespace parvl
