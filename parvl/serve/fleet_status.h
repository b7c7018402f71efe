// What `parvl ctl status` says: as JSON, as a table for people; and the same of a fleet for /metrics. Pure.
#pragma once

#include <string>
#include <vector>

#include "parvl/base/json.h"
#include "parvl/serve/fleet_view.h"
#include "parvl/serve/recent.h"

namespace parvl {

struct GatewayInfo {
  std::string version, model;
  double uptime_s = 0;
  absl::Status health;  // of the whole, as /health says it
  int64_t in_line = 0;  // requests that wait there for their turn
};

// Of the requests in the last window, in ascending order.
struct RecentLatency {
  double window_s = 0;
  std::vector<double> ttft_s, tpot_s;
};

struct FleetStatus {
  std::vector<PoolInfo> pools;
  std::vector<InstanceInfo> instances;
  FleetView::Parked parked;
  const BusyShare& busy;
  GatewayInfo gateway;
  RecentLatency latency;
};
Json status_json(const FleetStatus& status);

// Of an object as `GET /status` gives it; what is missing in it is shown as "-".
std::string status_table(const Json& status);

// In the Prometheus text format.
std::string fleet_metrics(const std::vector<PoolInfo>& pools, const std::vector<InstanceInfo>& instances);

}  // namespace parvl
