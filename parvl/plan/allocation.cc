#include "parvl/plan/allocation.h"

#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_join.h>

#include <algorithm>

namespace parvl {
namespace {

constexpr int64_t kMaxCount = 1 << 16, kMaxSize = 1 << 10;  // so that all of them multiplied stay in an int64_t
constexpr double kMaxSeconds = 1e7, kMaxMemoryGb = 1e6;

struct Axis {
  const char* parallel;
  const char* key;
  std::optional<int64_t> ModuleSpec::*size;
};
constexpr Axis kAxes[] = {{"data", "dp_size", &ModuleSpec::dp},
                          {"tensor", "tp_size", &ModuleSpec::tp},
                          {"pipeline", "pp_size", &ModuleSpec::pp},
                          {"sequence", "sp_size", &ModuleSpec::sp},
                          {"expert", "ep_size", &ModuleSpec::ep}};

// "gpu-24gb" → 24; nullopt when no such number stands in the name.
std::optional<double> memory_in_name(const std::string& name) {
  const std::string lower = absl::AsciiStrToLower(name);
  const size_t unit = lower.rfind("gb");
  if (unit == std::string::npos) return std::nullopt;
  size_t begin = unit;
  while (begin > 0 && absl::ascii_isdigit(static_cast<unsigned char>(lower[begin - 1]))) --begin;
  int64_t gb = 0;
  if (!absl::SimpleAtoi(lower.substr(begin, unit - begin), &gb) || gb < 1) return std::nullopt;
  return static_cast<double>(gb);
}

void read_optional(ConfigReader& section, const std::string& key, int64_t most, std::optional<int64_t>& out) {
  if (!section.has(key)) return;
  int64_t value = 1;
  section.integer(key, value, 1, most);
  out = value;
}

std::map<std::string, std::string> places(const ConfigReader& section, std::initializer_list<const char*> keys) {
  std::map<std::string, std::string> out;
  for (const char* key : keys) out[key] = section.where(key);
  return out;
}

absl::Status read_classes(ConfigReader& cluster, Allocation& out) {
  for (auto& [name, section] : cluster.named_sections("device_classes")) {
    DeviceClass device;
    device.memory_gb = memory_in_name(name).value_or(0);
    section.number("memory_gb", device.memory_gb, {.low = 0, .high = kMaxMemoryGb, .low_open = true});
    section.text("kind", device.kind);
    PARVL_RETURN_IF_ERROR(section.finish());
    out.device_classes[name] = device;
  }
  return absl::OkStatus();
}

absl::Status read_pools(ConfigReader& cluster, Allocation& out) {
  cluster.require("gpu_pools", "the pools of devices, as `NAME: {device: CLASS, min_instances: 1, max_instances: 8}`");
  for (auto& [name, section] : cluster.named_sections("gpu_pools")) {
    PoolSpec pool;
    pool.name = name;
    section.require("device", "the class of its devices");
    section.text("device", pool.device);
    section.integer("min_instances", pool.min_instances, 0, kMaxCount);
    read_optional(section, "max_instances", kMaxCount, pool.max_instances);
    read_optional(section, "devices", int64_t{kMaxCount} * kMaxCount, pool.devices);
    if (section.has("role")) {
      std::string role;
      section.choice("role", role, {kRoleNames.begin(), kRoleNames.end()});
      const auto found = std::find(kRoleNames.begin(), kRoleNames.end(), role);
      if (found != kRoleNames.end()) pool.role = static_cast<PoolRole>(found - kRoleNames.begin());
    }
    if (pool.max_instances.has_value() && *pool.max_instances < pool.min_instances) {
      section.fail("max_instances", absl::StrCat("(", *pool.max_instances, ") must not be below min_instances (",
                                                 pool.min_instances, ")"));
    }
    pool.where = places(section, {"device", "min_instances", "max_instances", "devices", "role"});
    PARVL_RETURN_IF_ERROR(section.finish());
    if (!out.device_classes.contains(pool.device)) {
      out.device_classes[pool.device] = {memory_in_name(pool.device).value_or(0), ""};
    }
    out.pools.push_back(std::move(pool));
  }
  return absl::OkStatus();
}

absl::Status read_cluster(ConfigReader& root, Allocation& out) {
  root.require("cluster", "the pools of devices");
  ConfigReader cluster = root.section("cluster");
  PARVL_RETURN_IF_ERROR(read_classes(cluster, out));
  PARVL_RETURN_IF_ERROR(read_pools(cluster, out));
  return cluster.finish();
}

absl::Status read_module(ModuleName name, ConfigReader section, Allocation& out) {
  ModuleSpec module;
  module.module = name;
  section.require("pool", "the name of the pool that it runs on");
  section.text("pool", module.pool);
  std::vector<std::string> axes;
  for (const Axis& axis : kAxes) axes.emplace_back(axis.parallel);
  section.choice("parallel", module.parallel, axes);
  for (const Axis& axis : kAxes) {
    read_optional(section, axis.key, kMaxSize, module.*axis.size);
    const bool needed = module.parallel == axis.parallel && module.parallel != "data";
    if (needed && !(module.*axis.size).has_value()) {
      section.fail("parallel", absl::StrCat("is ", axis.parallel, ", which needs ", axis.key));
    }
  }
  read_optional(section, "replicas", kMaxCount, module.replicas);
  const int64_t devices = module.dp.value_or(1) * module.tp.value_or(1) * module.pp.value_or(1) * module.sp.value_or(1);
  if (devices % module.ep.value_or(1) != 0) {
    section.fail("ep_size", absl::StrCat("(", *module.ep, ") must divide the ", devices,
                                         " devices of an instance (dp_size · ", "tp_size · pp_size · sp_size)"));
  }
  module.where =
      places(section, {"pool", "parallel", "dp_size", "tp_size", "pp_size", "sp_size", "ep_size", "replicas"});
  PARVL_RETURN_IF_ERROR(section.finish());
  const auto is_there = [&](const PoolSpec& pool) { return pool.name == module.pool; };
  if (std::none_of(out.pools.begin(), out.pools.end(), is_there)) {
    const auto name_of = [](std::string* text, const PoolSpec& pool) { text->append(pool.name); };
    return invalid(module.where["pool"], " names ", module.pool, ", which is no pool of cluster.gpu_pools (",
                   absl::StrJoin(out.pools, ", ", name_of), ")");
  }
  const auto same = [&](const ModuleSpec& other) { return other.module == name && other.pool == module.pool; };
  if (std::any_of(out.modules.begin(), out.modules.end(), same)) {
    return invalid(module.where["pool"], " names ", module.pool, " again; a module has one entry a pool");
  }
  out.modules.push_back(std::move(module));
  return absl::OkStatus();
}

absl::Status read_modules(ConfigReader& root, Allocation& out) {
  root.require("model", "the modules and their pools");
  ConfigReader model = root.section("model");
  model.require("modules", "the modules and their pools");
  ConfigReader modules = model.section("modules");
  modules.require("llm_backbone", "the pool that the LLM runs on");
  for (size_t i = 0; i < kModuleNames.size(); ++i) {
    const std::string key(kModuleNames[i]);
    const auto name = static_cast<ModuleName>(i);
    if (!modules.has(key)) continue;
    if (name == ModuleName::kBackbone && modules.kind(key) == ConfigNode::Kind::kList) {
      for (ConfigReader& entry : modules.section_list(key)) PARVL_RETURN_IF_ERROR(read_module(name, entry, out));
    } else {
      PARVL_RETURN_IF_ERROR(read_module(name, modules.section(key), out));
    }
  }
  const auto is_backbone = [](const ModuleSpec& module) { return module.module == ModuleName::kBackbone; };
  if (std::none_of(out.modules.begin(), out.modules.end(), is_backbone)) {
    modules.fail("llm_backbone", "lists no pool; give it one");
  }
  PARVL_RETURN_IF_ERROR(modules.finish());
  return model.finish();
}

absl::Status read_scheduler(ConfigReader scheduler, ScalingRules& out) {
  const NumberRange share{.low = 0, .high = 1}, seconds{.low = 0, .high = kMaxSeconds};
  const NumberRange some{.low = 0, .high = kMaxSeconds, .low_open = true};
  scheduler.choice("policy", out.policy, {"load-aware"});
  scheduler.number("expand_threshold", out.expand_threshold, share);
  scheduler.number("shrink_threshold", out.shrink_threshold, share);
  if (out.shrink_threshold >= out.expand_threshold) {
    scheduler.fail("shrink_threshold",
                   absl::StrCat("(", out.shrink_threshold, ") must be below expand_threshold (", out.expand_threshold,
                                "), or a pool would grow and shrink in turns"));
  }
  scheduler.number("cooldown_seconds", out.cooldown_seconds, seconds);
  scheduler.number("window_seconds", out.window_seconds, some);
  scheduler.number("forecast_seconds", out.forecast_seconds, seconds);
  scheduler.number("drain_timeout_seconds", out.drain_timeout_seconds, seconds);
  scheduler.boolean("lending", out.lending);
  scheduler.boolean("dry_run", out.dry_run);
  scheduler.boolean("approval", out.approval);
  scheduler.boolean("warmup", out.warmup);
  return scheduler.finish();
}

absl::Status read_queues(ConfigReader queues, Allocation& out) {
  for (size_t i = 0; i < kQueueNames.size(); ++i) {
    ConfigReader queue = queues.section(kQueueNames[i]);
    queue.integer("limit", out.queues[i].limit, 0, 100'000);
    queue.number("weight", out.queues[i].weight, {.low = 0, .high = 1e6, .low_open = true});
    queue.number("deadline_ms", out.queues[i].deadline_ms, {.low = 0, .high = kMaxSeconds * 1000});
    PARVL_RETURN_IF_ERROR(queue.finish());
  }
  return queues.finish();
}

absl::Status read_the_rest(ConfigReader& root, Allocation& out) {
  PARVL_RETURN_IF_ERROR(read_scheduler(root.section("scheduler"), out.scheduler));
  PARVL_RETURN_IF_ERROR(read_queues(root.section("queues"), out));
  ConfigReader slo = root.section("slo");
  slo.number("ttft_ms", out.ttft_ms, {.low = 0, .high = kMaxSeconds * 1000});
  slo.number("tpot_ms", out.tpot_ms, {.low = 0, .high = kMaxSeconds * 1000});
  PARVL_RETURN_IF_ERROR(slo.finish());
  ConfigReader admin = root.section("admin");
  admin.integer("port", out.admin_port, 0, 65535);
  admin.text("host", out.admin_host);
  out.admin_where = places(admin, {"host", "port"});
  ConfigReader tokens = admin.section("tokens");
  for (const char* role : {"viewer", "operator", "approver"}) {
    if (!tokens.has(role)) continue;
    std::string token;
    tokens.text(role, token);
    if (token.empty()) tokens.fail(role, "must not be empty");
    for (const auto& [other, same] : out.admin_tokens) {
      if (token == same) tokens.fail(role, "must not be the token of " + other + " too");
    }
    out.admin_tokens[role] = std::move(token);
  }
  PARVL_RETURN_IF_ERROR(tokens.finish());
  PARVL_RETURN_IF_ERROR(admin.finish());
  ConfigReader rollout = root.section("rollout");
  rollout.number("canary_share", out.rollout.canary_share, {.low = 0, .high = 1, .low_open = true, .high_open = true});
  rollout.number("window_seconds", out.rollout.window_seconds, {.low = 0, .high = kMaxSeconds, .low_open = true});
  rollout.text_list("rollback_on", out.rollout.rollback_on);
  return rollout.finish();
}

}  // namespace

absl::StatusOr<Allocation> read_allocation(const ConfigNode& node, const std::string& file) {
  Allocation out;
  out.file = file;
  ConfigReader root(node);
  PARVL_RETURN_IF_ERROR(read_cluster(root, out));
  PARVL_RETURN_IF_ERROR(read_modules(root, out));
  PARVL_RETURN_IF_ERROR(read_the_rest(root, out));
  PARVL_RETURN_IF_ERROR(root.finish());
  return out;
}

absl::StatusOr<Allocation> load_allocation(const std::string& file) {
  PARVL_ASSIGN_OR_RETURN(const ConfigNode root, load_config(file, {}));
  return read_allocation(root, file);
}

}  // namespace parvl
