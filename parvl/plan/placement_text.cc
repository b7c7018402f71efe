#include "parvl/plan/placement_text.h"

namespace parvl {
namespace {

Json layout_json(const ModuleLayout& layout) {
  return {{"dp_size", layout.dp},
          {"tp_size", layout.tp},
          {"pp_size", layout.pp},
          {"sp_size", layout.sp},
          {"ep_size", layout.ep}};
}

Json pool_json(const PoolPlan& pool, const DeviceClass& device, const std::map<std::string, std::string>& device_map) {
  Json modules = Json::object();
  for (const PlacedModule& placed : pool.modules) {
    modules[std::string(kModuleNames[static_cast<size_t>(placed.module)])] = layout_json(placed.layout);
  }
  const auto mapped = device_map.find(pool.device);
  return {{"role", kRoleNames[static_cast<size_t>(pool.role)]},
          {"device", pool.device},
          {"computes_on", mapped == device_map.end() ? "cuda" : mapped->second},
          {"memory_gb", device.memory_gb == 0 ? Json() : Json(device.memory_gb)},
          {"min_instances", pool.min_instances},
          {"instances", pool.instances},
          {"max_instances", pool.max_instances},
          {"devices_an_instance", pool.devices_an_instance},
          {"devices", pool.devices},
          {"modules", std::move(modules)},
          {"weight_bytes_a_device", pool.weight_bytes},
          {"reasons", pool.reasons}};
}

Json scheduler_json(const ScalingRules& rules) {
  return {{"policy", rules.policy},
          {"expand_threshold", rules.expand_threshold},
          {"shrink_threshold", rules.shrink_threshold},
          {"cooldown_seconds", rules.cooldown_seconds},
          {"window_seconds", rules.window_seconds},
          {"forecast_seconds", rules.forecast_seconds},
          {"drain_timeout_seconds", rules.drain_timeout_seconds},
          {"lending", rules.lending},
          {"dry_run", rules.dry_run},
          {"approval", rules.approval},
          {"warmup", rules.warmup}};
}

}  // namespace

Json placement_json(const Allocation& allocation, const PlacementPlan& plan,
                    const std::map<std::string, std::string>& device_map) {
  Json pools = Json::object(), queues = Json::object(), tokens = Json::array();
  for (const PoolPlan& pool : plan.pools) {
    pools[pool.name] = pool_json(pool, allocation.device_classes.at(pool.device), device_map);
  }
  for (size_t i = 0; i < kQueueNames.size(); ++i) {
    const QueueRules& queue = allocation.queues[i];
    queues[kQueueNames[i]] = {{"limit", queue.limit}, {"weight", queue.weight}, {"deadline_ms", queue.deadline_ms}};
  }
  for (const auto& [role, token] : allocation.admin_tokens) tokens.push_back(role);
  const RolloutRules& rollout = allocation.rollout;
  return {
      {"pools", std::move(pools)},
      {"scheduler", scheduler_json(allocation.scheduler)},
      {"queues", std::move(queues)},
      {"slo", {{"ttft_ms", allocation.ttft_ms}, {"tpot_ms", allocation.tpot_ms}}},
      {"admin", {{"host", allocation.admin_host}, {"port", allocation.admin_port}, {"tokens_for", std::move(tokens)}}},
      {"rollout",
       {{"canary_share", rollout.canary_share},
        {"window_seconds", rollout.window_seconds},
        {"rollback_on", rollout.rollback_on}}}};
}

}  // namespace parvl
