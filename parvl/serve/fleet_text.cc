// A fleet's status as text: a table for people, and lines for Prometheus.
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>

#include <algorithm>
#include <array>

#include "parvl/base/text.h"
#include "parvl/serve/fleet_status.h"

namespace parvl {
namespace {

using Row = std::vector<std::string>;
constexpr size_t kMaxCell = 120;
constexpr char kNothing[] = "-";

// The status comes from a server, which may be of another version: whatever is not as expected is shown as it is.
std::string cell(const Json& value) {
  if (value.is_null()) return kNothing;
  if (value.is_array()) {
    const std::string all = absl::StrJoin(value, ", ", [](std::string* out, const Json& item) { *out += cell(item); });
    return all.empty() ? kNothing : all;
  }
  std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  text = one_line(text);
  if (text.size() > kMaxCell) text = excerpt(text, kMaxCell);
  return text.empty() ? kNothing : text;
}

Json member(const Json& object, const char* name) {
  return object.is_object() && object.contains(name) ? object[name] : Json();
}

std::string percent(const Json& share) {
  return share.is_number() ? absl::StrFormat("%.0f %%", share.get<double>() * 100) : kNothing;
}

std::string duration(const Json& seconds) {
  if (!seconds.is_number()) return kNothing;
  const auto s = static_cast<int64_t>(seconds.get<double>());
  if (s < 60) return absl::StrCat(s, " s");
  if (s < 3600) return absl::StrCat(s / 60, " min ", s % 60, " s");
  return absl::StrCat(s / 3600, " h ", s / 60 % 60, " min");
}

std::string latency_line(const Json& latency) {
  const auto ms = [&](const char* name, const char* which) {
    const Json value = member(member(latency, name), which);
    return value.is_number() ? absl::StrFormat("%.1f ms", value.get<double>()) : kNothing;
  };
  return absl::StrCat("TTFT p50 ", ms("ttft_ms", "p50"), ", p99 ", ms("ttft_ms", "p99"), "; TPOT p50 ",
                      ms("tpot_ms", "p50"), ", p99 ", ms("tpot_ms", "p99"), "  (requests in the last ",
                      cell(member(latency, "window_seconds")), " s: ", cell(member(latency, "requests")), ")\n");
}

std::string gateway_line(const Json& gateway) {
  const Json ready = member(gateway, "ready"), reason = member(gateway, "reason");
  const std::string state = ready == Json(true) ? "ready" : absl::StrCat("not ready: ", cell(reason));
  return absl::StrCat("parvl ", cell(member(gateway, "version")), " serves ", cell(member(gateway, "model")), ", up ",
                      duration(member(gateway, "uptime_s")), "; ", state, "\n");
}

// With the modules that it holds beside those of its pool.
std::string pool_of(const Json& instance, const Json& pools) {
  const Json name = member(instance, "pool");
  const Json own = member(name.is_string() ? member(pools, name.get<std::string>().c_str()) : Json(), "modules");
  const Json modules = member(instance, "modules");
  Json added = Json::array();
  for (const Json& module : modules) {
    if (own.is_array() && std::find(own.begin(), own.end(), module) == own.end()) added.push_back(module);
  }
  return added.empty() ? cell(name) : absl::StrCat(cell(name), " + ", cell(added));
}

// Columns as wide as their widest cell.
std::string table(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const Row& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) absl::StrAppendFormat(&line, "%-*s  ", static_cast<int>(widths[i]), row[i]);
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::string label_text(const std::string& value) {
  return absl::StrReplaceAll(value, {{"\\", "\\\\"}, {"\"", "\\\""}, {"\n", "\\n"}});
}

void head(std::string& out, const char* name, const char* type, const char* help) {
  absl::StrAppend(&out, "# HELP ", name, " ", help, "\n# TYPE ", name, " ", type, "\n");
}

}  // namespace

std::string status_table(const Json& status) {
  std::vector<Row> pools = {{"POOL", "ROLE", "DEVICES", "BUSY", "QUEUE", "READY", "MODULES"}};
  const Json all_pools = member(status, "pools"), all_instances = member(status, "instances");
  for (const auto& [name, pool] : all_pools.items()) {
    pools.push_back({cell(name), cell(member(pool, "role")),
                     absl::StrCat(cell(member(pool, "devices")), " x ", cell(member(pool, "device"))),
                     percent(member(pool, "busy")), cell(member(pool, "queue")), cell(member(pool, "ready")),
                     cell(member(pool, "modules"))});
  }
  std::vector<Row> instances = {{"INSTANCE", "POOL", "STATE", "EPOCH", "PIDS", "DEVICE", "BUSY", "RUNNING", "WAITING",
                                 "FAILURES", "LAST FAILURE"}};
  for (const auto& [index, instance] : all_instances.items()) {
    const auto of = [&instance = instance](const char* name) { return cell(member(instance, name)); };
    instances.push_back({of("id"), pool_of(instance, all_pools), of("state"), of("epoch"), of("pids"), of("device"),
                         percent(member(instance, "busy")), of("running"), of("waiting"), of("failures"),
                         of("reason")});
  }
  return absl::StrCat(gateway_line(member(status, "gateway")), latency_line(member(status, "latency")), "\n",
                      table(pools), "\n", table(instances));
}

std::string fleet_metrics(const std::vector<PoolInfo>& pools, const std::vector<InstanceInfo>& instances) {
  std::string out;
  head(out, "parvl_instances", "gauge", "Instances of a pool by what they are doing.");
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    for (size_t state = 0; state < kInstanceStateNames.size(); ++state) {
      const auto count = std::count_if(instances.begin(), instances.end(), [&](const InstanceInfo& instance) {
        return instance.pool == pool && instance.state == static_cast<InstanceState>(state);
      });
      absl::StrAppend(&out, "parvl_instances{pool=\"", label_text(pools[pool].name), "\",state=\"",
                      std::string(kInstanceStateNames[state]), "\"} ", count, "\n");
    }
  }
  head(out, "parvl_instance_failures_total", "counter",
       "Failures of a pool's instances, each of which is started again.");
  int64_t stale = 0;
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    int64_t failures = 0;
    for (const InstanceInfo& instance : instances) {
      if (instance.pool != pool) continue;
      failures += instance.failures;
      stale += instance.stale;
    }
    absl::StrAppend(&out, "parvl_instance_failures_total{pool=\"", label_text(pools[pool].name), "\"} ", failures,
                    "\n");
  }
  head(out, "parvl_stale_messages_total", "counter", "Words of processes that count as dead, which had no effect.");
  return absl::StrCat(out, "parvl_stale_messages_total ", stale, "\n");
}

}  // namespace parvl
