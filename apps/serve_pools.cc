#include "apps/serve_pools.h"

#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/types/span.h>

#include <algorithm>
#include <random>
#include <set>

#include "apps/local_instances.h"
#include "parvl/base/fingerprint.h"
#include "parvl/base/gpu_driver.h"
#include "parvl/base/log.h"
#include "parvl/base/memory.h"
#include "parvl/base/shared_block.h"
#include "parvl/exec/record_file.h"
#include "parvl/serve/pools/fleet_engine.h"
#include "parvl/serve/pools/pixels.h"

namespace parvl {
namespace {

constexpr int64_t kLeastPixelBytes = int64_t{1} << 30;

std::string device_of(const PoolServing& pools, const PoolPlan& pool) {
  const auto mapped = pools.device_map.find(pool.device);
  return mapped == pools.device_map.end() ? "cuda" : mapped->second;
}

std::string random_token() {
  std::random_device entropy;
  std::string out;
  for (int i = 0; i < 8; ++i) absl::StrAppendFormat(&out, "%08x", entropy());
  return out;
}

std::string modules_text(const PoolPlan& pool) {
  return absl::StrJoin(pool.modules, ", ", [](std::string* out, const PlacedModule& placed) {
    absl::StrAppend(out, std::string(kModuleNames[static_cast<size_t>(placed.module)]));
  });
}

bool holds(const PoolPlan& pool, ModuleName name) {
  return std::any_of(pool.modules.begin(), pool.modules.end(),
                     [name](const PlacedModule& placed) { return placed.module == name; });
}

// Of the LLM, where the pool has it.
ModuleLayout backbone_layout(const PoolPlan& pool) {
  for (const PlacedModule& placed : pool.modules) {
    if (placed.module == ModuleName::kBackbone) return placed.layout;
  }
  return {};
}

// Of an instance.
int64_t ranks_of(const PoolPlan& pool) { return backbone_layout(pool).product(); }

bool is_on_cpu(const PoolServing& pools, const PoolPlan& pool) { return device_of(pools, pool) == "cpu"; }

// On this machine's GPUs; nothing is asked of the driver where all compute on the CPU.
absl::StatusOr<GpuPlacement> place_here(const PoolServing& pools) {
  std::vector<const PoolPlan*> on_gpus;
  for (const PoolPlan& pool : pools.plan.pools) {
    if (!is_on_cpu(pools, pool)) on_gpus.push_back(&pool);
  }
  if (on_gpus.empty()) return GpuPlacement();
  PARVL_ASSIGN_OR_RETURN(const int64_t count, count_gpus());
  return place_on_gpus(on_gpus, gpu_names(count));
}

// Of all ranks of an instance.
int64_t weight_bytes(const PoolPlan& pool) { return pool.weight_bytes * ranks_of(pool); }

// Equal for pools whose instances hold the same parts of the model.
std::string part_of(const PoolPlan& pool) {
  const ModuleLayout layout = backbone_layout(pool);
  return absl::StrCat(modules_text(pool), " over ", layout.tp, " × ", layout.pp);
}

// Instances on the CPU that hold the same parts map the same memory, a block for each rank; by part_of(). One alone
// keeps memory of its own: that can lie on large pages, which shared memory often cannot.
using SharedWeights = std::map<std::string, std::vector<std::shared_ptr<SharedBlock>>>;
absl::StatusOr<SharedWeights> share_weights(const PoolServing& pools) {
  std::map<std::string, int64_t> instances, ranks;
  for (const PoolPlan& pool : pools.plan.pools) {
    if (!is_on_cpu(pools, pool)) continue;
    instances[part_of(pool)] += pool.instances;
    ranks[part_of(pool)] = ranks_of(pool);
  }
  SharedWeights out;
  for (const auto& [part, count] : instances) {
    for (int64_t rank = 0; count > 1 && rank < ranks[part]; ++rank) {
      PARVL_ASSIGN_OR_RETURN(auto block, SharedBlock::create("parvl-weights"));
      out[part].push_back(std::move(block));
    }
  }
  return out;
}

// What is left of the CPU's memory for each instance on it beside all weights, of which those that are shared count
// once.
int64_t cpu_room(const PoolServing& pools, const SharedWeights& shared) {
  int64_t left = available_bytes(), instances = 0;
  std::set<std::string> counted;
  for (const PoolPlan& pool : pools.plan.pools) {
    if (!is_on_cpu(pools, pool)) continue;
    instances += pool.instances;
    if (shared.count(part_of(pool)) == 0) {
      left -= weight_bytes(pool) * pool.instances;
    } else if (counted.insert(part_of(pool)).second) {
      left -= weight_bytes(pool);
    }
  }
  return std::max<int64_t>(0, left) / std::max<int64_t>(1, instances);
}

// Of one instance: a class may say how much one of its devices has.
int64_t memory_limit(const PoolServing& pools, const PoolPlan& pool, int64_t room, int64_t limit) {
  double class_bytes = pools.allocation.device_classes.at(pool.device).memory_gb * 1e9;
  if (is_on_cpu(pools, pool)) class_bytes *= static_cast<double>(ranks_of(pool));  // which share it
  const auto at_most = [&](int64_t bytes) { limit = limit == 0 ? bytes : std::min(limit, bytes); };
  if (class_bytes > 0) at_most(static_cast<int64_t>(class_bytes));
  if (is_on_cpu(pools, pool)) at_most(weight_bytes(pool) + room);
  return limit;
}

}  // namespace

absl::StatusOr<PoolServing> read_pools(const std::string& config, const std::string& device_map,
                                       const std::string& model_dir, const std::string& dtype) {
  PoolServing out;
  PARVL_ASSIGN_OR_RETURN(out.allocation, load_allocation(config));
  PARVL_ASSIGN_OR_RETURN(out.device_map, parse_device_map(device_map, out.allocation));
  PARVL_ASSIGN_OR_RETURN(const ModelSpec spec, load_model_spec(model_dir));
  DType type = spec.dtype;
  if (dtype != "auto") {
    PARVL_ASSIGN_OR_RETURN(type, parse_dtype(dtype));
  }
  PARVL_ASSIGN_OR_RETURN(out.plan, place(out.allocation, spec, type));
  return out;
}

namespace {

// What cuts a module over the devices of an instance; the LLM not by the last two yet.
using Cut = std::pair<const char*, std::optional<int64_t> ModuleSpec::*>;
constexpr Cut kCuts[] = {{"tp_size", &ModuleSpec::tp},
                         {"pp_size", &ModuleSpec::pp},
                         {"sp_size", &ModuleSpec::sp},
                         {"dp_size", &ModuleSpec::dp}};
constexpr absl::Span<const Cut> kNotOfLlm = absl::MakeConstSpan(kCuts).subspan(2);

// FILE:LINE: 'KEY' of which of `cut` cuts the module.
std::string cut_place(const Allocation& allocation, const PoolPlan& pool, ModuleName name,
                      absl::Span<const Cut> cut = kCuts) {
  for (const ModuleSpec& module : allocation.modules) {
    if (module.pool != pool.name || module.module != name) continue;
    for (const auto& [key, size] : cut) {
      if ((module.*size).value_or(1) > 1) return absl::StrCat(module.where.at(key), " (", *(module.*size), ")");
    }
    return module.where.at("pool");  // it follows another module there
  }
  return allocation.file;
}

// What is moved between a prefill and a decode instance lies on one device of each.
absl::Status check_half(const Allocation& allocation, const PoolPlan& pool) {
  const bool half = pool.role == PoolRole::kPrefill || pool.role == PoolRole::kDecode;
  if (!half || pool.devices_an_instance == 1) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      cut_place(allocation, pool, ModuleName::kBackbone), ": an instance of several devices with the role ",
      std::string(kRoleNames[static_cast<size_t>(pool.role)]), " is not available yet; leave it out, or give ",
      pool.name, " the role llm"));
}

// Over the devices of an instance the LLM is cut by tensors and layers; its encoder is whole, on each.
absl::Status check_cut(const Allocation& allocation, const PoolPlan& pool, const PlacedModule& placed) {
  const ModuleLayout& layout = placed.layout;
  const std::string name(kModuleNames[static_cast<size_t>(placed.module)]);
  if (placed.module == ModuleName::kBackbone) {
    if (layout.tp * layout.pp == layout.product()) return absl::OkStatus();
    return absl::UnimplementedError(absl::StrCat(
        cut_place(allocation, pool, placed.module, kNotOfLlm), ": ", name,
        " cut so is not available yet; leave it out: valid here are tp_size and pp_size, or more replicas"));
  }
  if (layout.product() == 1 || (layout.dp == layout.product() && pool.role == PoolRole::kLlm)) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(cut_place(allocation, pool, placed.module), ": ", name,
                                               " over several devices of an instance is not available yet; ",
                                               "leave it out, and give more replicas"));
}

// What passes between the encoder and the projector is not sent.
absl::Status check_together(const Allocation& allocation, const PoolPlan& pool) {
  if (holds(pool, ModuleName::kVisionEncoder) == holds(pool, ModuleName::kProjector)) return absl::OkStatus();
  for (const ModuleSpec& module : allocation.modules) {
    if (module.module != ModuleName::kProjector) continue;
    return absl::UnimplementedError(absl::StrCat(module.where.at("pool"), " (", module.pool,
                                                 "): a projector apart from its encoder is not available yet; ",
                                                 "leave projector out, and it is where vision_encoder is"));
  }
  return absl::OkStatus();
}

// Where answers can be computed whole, a lost decode pool would stop them all the same.
absl::Status check_mix(const Allocation& allocation, const PlacementPlan& plan) {
  const auto with = [&plan](PoolRole role) {
    return std::find_if(plan.pools.begin(), plan.pools.end(),
                        [role](const PoolPlan& pool) { return pool.role == role; });
  };
  const auto prefill = with(PoolRole::kPrefill), whole = with(PoolRole::kLlm);
  if (prefill == plan.pools.end() || whole == plan.pools.end()) return absl::OkStatus();
  const auto spec = std::find_if(allocation.pools.begin(), allocation.pools.end(),
                                 [&](const PoolSpec& pool) { return pool.name == prefill->name; });
  return absl::UnimplementedError(absl::StrCat(spec->where.at("role"), " is prefill, and ", whole->name,
                                               " has the role llm: the two beside each other are not available yet; "
                                               "let all of llm_backbone's pools have the role llm, or none"));
}

}  // namespace

absl::Status check_servable(const Allocation& allocation, const PlacementPlan& plan) {
  PARVL_RETURN_IF_ERROR(check_mix(allocation, plan));
  for (const PoolPlan& pool : plan.pools) {
    PARVL_RETURN_IF_ERROR(check_half(allocation, pool));
    PARVL_RETURN_IF_ERROR(check_together(allocation, pool));
    for (const PlacedModule& placed : pool.modules) PARVL_RETURN_IF_ERROR(check_cut(allocation, pool, placed));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<PixelStore>> start_pixels(const Context& context) {
  return PixelStore::start(random_token(), std::max(kLeastPixelBytes, available_bytes() / 4), context.clock);
}

absl::StatusOr<std::unique_ptr<Engine>> start_pools(const PoolServing& pools, const PoolsBase& base,
                                                    const Context& context) {
  const EngineOptions& engine = base.engine;
  FleetOptions options;
  PARVL_ASSIGN_OR_RETURN(GpuPlacement gpus, place_here(pools));
  PARVL_ASSIGN_OR_RETURN(const SharedWeights shared, share_weights(pools));
  const int64_t room = cpu_room(pools, shared);
  for (const PoolPlan& pool : pools.plan.pools) {
    options.fleet.pools.push_back({.name = pool.name,
                                   .instances = pool.instances,
                                   .encodes = holds(pool, ModuleName::kVisionEncoder),
                                   .generates = holds(pool, ModuleName::kBackbone) && pool.role != PoolRole::kDecode,
                                   .hands_over = pool.role == PoolRole::kPrefill,
                                   .takes_over = pool.role == PoolRole::kDecode});
    EngineOptions own = engine;
    own.load.device = device_of(pools, pool);
    own.step_s = pools.allocation.tpot_ms * 1e-3;
    own.tensor_ranks = backbone_layout(pool).tp;
    own.pipeline_stages = backbone_layout(pool).pp;
    own.load.memory_limit_bytes = memory_limit(pools, pool, room, engine.load.memory_limit_bytes);
    if (const auto found = shared.find(part_of(pool)); found != shared.end()) {
      for (const auto& block : found->second) own.load.shared_weights.push_back(block->path());
    }
    for (const PlacedModule& placed : pool.modules) {
      own.load.modules.emplace_back(kModuleNames[static_cast<size_t>(placed.module)]);
    }
    options.engines.push_back(own);
    log_info("pool ", pool.name, " (", std::string(kRoleNames[static_cast<size_t>(pool.role)]), "): ", pool.instances,
             pool.instances == 1 ? " instance" : " instances", " with ", modules_text(pool), " on ", pool.device,
             is_on_cpu(pools, pool) ? " (cpu)" : "");
  }
  log_info("each pool keeps its instances: scaling by load is not available yet");
  options.fleet.instance.drain_s = pools.allocation.scheduler.drain_timeout_seconds;
  options.model_dir = base.model_dir;
  PARVL_ASSIGN_OR_RETURN(options.fingerprint, fingerprint_model(base.model_dir));
  options.pixels = base.pixels;
  if (!engine.record_path.empty()) {
    PARVL_ASSIGN_OR_RETURN(options.record, record_to(engine.record_path, engine.record_max_bytes));
  }
  LoadOptions front = engine.load;
  front.startup = nullptr;  // a part of what comes before the instances are ready, not a phase
  PARVL_ASSIGN_OR_RETURN(options.front, load_front(base.model_dir, front));
  options.watch = [view = base.view](FleetEngine* fleet) { view->show(fleet); };
  std::vector<std::shared_ptr<SharedBlock>> weights;
  for (const auto& [part, blocks] : shared) weights.insert(weights.end(), blocks.begin(), blocks.end());
  auto starter = make_local_instances(context.program_folder + "/parvl", std::move(gpus), std::move(weights));
  PARVL_ASSIGN_OR_RETURN(auto fleet, FleetEngine::start(std::move(options), std::move(starter), context.clock));
  return std::unique_ptr<Engine>(std::move(fleet));
}

void set_queues(const Allocation& allocation, ServeOptions& options) {
  for (size_t i = 0; i < options.queues.size(); ++i) {
    const QueueRules& rules = allocation.queues[i];
    options.queues[i] = {.limit = rules.limit, .share = rules.weight};
    if (rules.deadline_ms > 0) options.queues[i].deadline = std::chrono::duration<double>(rules.deadline_ms / 1e3);
  }
}

}  // namespace parvl
