#include "parvl/serve/fleet_status.h"

#include <algorithm>
#include <utility>

#include "parvl/base/text.h"

namespace parvl {
namespace {

std::string name_of(InstanceState state) { return std::string(kInstanceStateNames[static_cast<size_t>(state)]); }

Json instance_json(const InstanceInfo& instance, const PoolInfo& pool, const BusyShare& busy) {
  const EngineStats& stats = instance.stats;
  std::vector<std::string> modules = pool.modules;
  modules.insert(modules.end(), instance.added.begin(), instance.added.end());
  const double kv = stats.blocks == 0 ? 0 : static_cast<double>(stats.blocks_used) / static_cast<double>(stats.blocks);
  return {{"id", instance.id},
          {"epoch", instance.epoch},
          {"pids", instance.pids},
          {"pool", pool.name},
          {"devices", instance.devices},
          {"device", instance.device},
          {"modules", std::move(modules)},
          {"state", name_of(instance.state)},
          {"running", std::max<int64_t>(0, instance.running - instance.waiting)},
          {"waiting", instance.waiting},
          {"busy", busy.of_instance(instance.id)},
          {"failures", instance.failures},
          {"reason", instance.reason},
          {"stale", instance.stale},
          {"kv_usage", kv},
          {"encoder_cache_bytes", stats.encoder_bytes_used}};
}

Json quantiles_ms(const std::vector<double>& seconds) {
  if (seconds.empty()) return nullptr;
  return {{"p50", quantile(seconds, 0.5) * 1e3}, {"p99", quantile(seconds, 0.99) * 1e3}};
}

Json latency_json(const RecentLatency& latency) {
  return {{"window_seconds", latency.window_s},
          {"requests", latency.ttft_s.size()},
          {"ttft_ms", quantiles_ms(latency.ttft_s)},
          {"tpot_ms", quantiles_ms(latency.tpot_s)}};
}

Json gateway_json(const GatewayInfo& gateway) {
  const bool ready = gateway.health.ok();
  return {{"version", gateway.version},
          {"model", gateway.model},
          {"uptime_s", gateway.uptime_s},
          {"ready", ready},
          {"reason", ready ? "" : one_line(std::string(gateway.health.message()))},
          {"queue", gateway.in_line}};
}

}  // namespace

// Who waits in the gateway's line, or for any instance to come back, waits for whichever pool takes that work: it is
// counted once, with the first of them.
Json status_json(const FleetStatus& status) {
  Json pools = Json::object(), instances = Json::array();
  int64_t to_take = status.gateway.in_line + status.parked.generations, to_encode = status.parked.encodings;
  for (size_t i = 0; i < status.pools.size(); ++i) {
    const PoolInfo& pool = status.pools[i];
    int64_t queue = 0, ready = 0;
    if (pool.takes_requests) queue += std::exchange(to_take, 0);
    if (pool.role == "encode") queue += std::exchange(to_encode, 0);
    for (const InstanceInfo& instance : status.instances) {
      if (instance.pool != i) continue;
      queue += instance.waiting;
      ready += instance.state == InstanceState::kReady ? 1 : 0;
    }
    pools[pool.name] = {{"role", pool.role}, {"device", pool.device},          {"devices", pool.devices},
                        {"queue", queue},    {"busy", status.busy.of_pool(i)}, {"modules", pool.modules},
                        {"ready", ready}};
  }
  for (const InstanceInfo& instance : status.instances) {
    instances.push_back(instance_json(instance, status.pools.at(instance.pool), status.busy));
  }
  return {{"pools", std::move(pools)},
          {"instances", std::move(instances)},
          {"gateway", gateway_json(status.gateway)},
          {"latency", latency_json(status.latency)}};
}

}  // namespace parvl
