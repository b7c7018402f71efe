#include "parvl/plan/placement.h"

#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include <algorithm>
#include <set>

#include "parvl/base/check.h"
#include "parvl/plan/cost/fit.h"
#include "parvl/plan/cost/memory.h"

namespace parvl {
namespace {

std::string_view name_of(ModuleName module) { return kModuleNames[static_cast<size_t>(module)]; }
std::string_view name_of(PoolRole role) { return kRoleNames[static_cast<size_t>(role)]; }

bool has_sizes(const ModuleSpec& module) {
  return module.dp.has_value() || module.tp.has_value() || module.pp.has_value() || module.sp.has_value();
}

ModuleLayout layout_of(const ModuleSpec& module) {
  ModuleLayout out;
  out.dp = module.dp.value_or(1);
  out.tp = module.tp.value_or(1);
  out.pp = module.pp.value_or(1);
  out.sp = module.sp.value_or(1);
  out.ep = module.ep.value_or(1);
  return out;
}

ModuleLayout data_parallel(int64_t devices) {
  ModuleLayout out;
  out.dp = devices;
  return out;
}

std::string where(const std::map<std::string, std::string>& places, const char* key) { return places.at(key); }

// `modules`: whose parameters must be cut so.
absl::Status check_tensor(const ModuleSpec& module, const ModelSpec& spec, const std::vector<std::string>& modules) {
  return check_tensor_ranks(spec, modules, module.tp.value_or(1), where(module.where, "tp_size"));
}

absl::Status check_layers(const ModuleSpec& module, int64_t layers) {
  return check_stages(layers, std::string(name_of(module.module)), module.pp.value_or(1),
                      where(module.where, "pp_size"));
}

absl::Status check_against(const ModuleSpec& module, const ModelSpec& spec) {
  const std::string name(name_of(module.module));
  const bool encoder = module.module == ModuleName::kVisionEncoder || module.module == ModuleName::kProjector;
  if (module.module == ModuleName::kAudioEncoder || (encoder && !spec.vision.has_value())) {
    return invalid(where(module.where, "pool"), " places a module that this model (", spec.model_type,
                   ") does not have: ", name, "; leave it out");
  }
  if (module.ep.value_or(1) > 1) {
    return invalid(where(module.where, "ep_size"), " (", *module.ep, "): this model (", spec.model_type,
                   ") has no experts; leave it out");
  }
  if (!encoder) {
    PARVL_RETURN_IF_ERROR(check_tensor(module, spec, {name}));
    return check_layers(module, spec.backbone.layers);
  }
  // The projector takes the encoder's rows where they lie, and is held to what that can be cut over.
  const std::string vision(name_of(ModuleName::kVisionEncoder)), projector(name_of(ModuleName::kProjector));
  if (module.module == ModuleName::kProjector) return check_tensor(module, spec, {vision, projector});
  PARVL_RETURN_IF_ERROR(check_tensor(module, spec, {vision}));
  return check_layers(module, spec.vision->layers);
}

class Planner {
 public:
  Planner(const Allocation& allocation, const ModelSpec& spec, DType dtype)
      : allocation_(allocation), spec_(spec), dtype_(dtype), bytes_(weight_bytes(spec, dtype)) {}

  absl::StatusOr<PlacementPlan> run() {
    for (const ModuleSpec& module : allocation_.modules) PARVL_RETURN_IF_ERROR(check_against(module, spec_));
    PARVL_RETURN_IF_ERROR(check_roles());
    PlacementPlan plan;
    for (const PoolSpec& pool : allocation_.pools) {
      PARVL_ASSIGN_OR_RETURN(PoolPlan planned, plan_pool(pool));
      plan.pools.push_back(std::move(planned));
    }
    return plan;
  }

 private:
  std::vector<const ModuleSpec*> modules_of(const PoolSpec& pool) const {
    std::vector<const ModuleSpec*> out;
    for (const ModuleSpec& module : allocation_.modules) {
      if (module.pool == pool.name) out.push_back(&module);
    }
    return out;
  }
  static const ModuleSpec* find(const std::vector<const ModuleSpec*>& modules, ModuleName name) {
    const auto found =
        std::find_if(modules.begin(), modules.end(), [&](const ModuleSpec* module) { return module->module == name; });
    return found == modules.end() ? nullptr : *found;
  }
  bool is_placed(ModuleName name) const {
    return std::any_of(allocation_.modules.begin(), allocation_.modules.end(),
                       [&](const ModuleSpec& module) { return module.module == name; });
  }
  PoolRole role_of(const PoolSpec& pool) const {
    const bool backbone = find(modules_of(pool), ModuleName::kBackbone) != nullptr;
    return pool.role.value_or(backbone ? PoolRole::kLlm : PoolRole::kEncode);
  }

  absl::Status check_role(const PoolSpec& pool) const {
    const std::vector<const ModuleSpec*> modules = modules_of(pool);
    const PoolRole role = role_of(pool);
    if (modules.empty()) {
      return invalid(where(pool.where, "device"), ": no module is placed on the pool ", pool.name,
                     "; place one there, or leave the pool out");
    }
    const bool backbone = find(modules, ModuleName::kBackbone) != nullptr;
    if (backbone == (role == PoolRole::kEncode)) {
      return invalid(where(pool.where, "role"), " is ", std::string(name_of(role)), ", but llm_backbone is ",
                     backbone ? "" : "not ", "placed on ", pool.name,
                     "; valid here: ", backbone ? "llm, prefill, decode" : "encode");
    }
    if (role == PoolRole::kDecode && modules.size() > 1) {
      return invalid(where(pool.where, "role"), " is decode, so ", pool.name, " sees no images; place ",
                     std::string(name_of(modules.front()->module)), " elsewhere");
    }
    return absl::OkStatus();
  }

  // Prompts and answers need each other; an LLM pool does both.
  absl::Status check_roles() const {
    std::map<PoolRole, const PoolSpec*> first;
    for (const PoolSpec& pool : allocation_.pools) {
      PARVL_RETURN_IF_ERROR(check_role(pool));
      first.emplace(role_of(pool), &pool);
    }
    const std::pair<PoolRole, PoolRole> halves[] = {{PoolRole::kPrefill, PoolRole::kDecode},
                                                    {PoolRole::kDecode, PoolRole::kPrefill}};
    for (const auto& [one, other] : halves) {
      if (!first.contains(one) || first.contains(other)) continue;
      return invalid(where(first.at(one)->where, "role"), " is ", std::string(name_of(one)),
                     ", and no pool has the role ", std::string(name_of(other)),
                     "; add one, or make the role llm, which does both");
    }
    return absl::OkStatus();
  }

  // How the pool's instances are cut: as their backbone is, else as the first module that says.
  absl::Status plan_modules(const std::vector<const ModuleSpec*>& modules, PoolPlan& out) const {
    const ModuleSpec* main = find(modules, ModuleName::kBackbone);
    for (const ModuleSpec* module : modules) {
      if (main == nullptr && has_sizes(*module)) main = module;
    }
    if (main == nullptr) main = modules.front();
    out.devices_an_instance = layout_of(*main).product();
    for (const ModuleSpec* module : modules) {
      const bool follows = module != main && !has_sizes(*module);
      const ModuleLayout layout = follows ? data_parallel(out.devices_an_instance) : layout_of(*module);
      if (layout.product() != out.devices_an_instance) {
        return invalid(where(module->where, "parallel"), ": ", std::string(name_of(module->module)), " covers ",
                       layout.product(), " devices, but an instance of ", out.name, " has ", out.devices_an_instance,
                       ", as ", std::string(name_of(main->module)),
                       " says; leave the sizes out, or let their product be ", out.devices_an_instance);
      }
      if (follows && layout.dp > 1) {
        out.reasons.push_back(absl::StrCat(std::string(name_of(module->module)), ": data parallel over the ", layout.dp,
                                           " devices of each instance, since no sizes are given"));
      }
      out.modules.push_back({module->module, layout});
    }
    return absl::OkStatus();
  }

  void add_unplaced(PoolPlan& out) const {
    if (!spec_.vision.has_value()) return;
    const auto holds = [&](ModuleName name) {
      return std::any_of(out.modules.begin(), out.modules.end(),
                         [&](const PlacedModule& placed) { return placed.module == name; });
    };
    const bool prompts = out.role == PoolRole::kLlm || out.role == PoolRole::kPrefill;
    if (!is_placed(ModuleName::kVisionEncoder) && prompts) {
      out.modules.insert(out.modules.begin(), {ModuleName::kVisionEncoder, data_parallel(out.devices_an_instance)});
      out.reasons.emplace_back("vision_encoder: inside each instance, since no pool is given for it");
    }
    if (!is_placed(ModuleName::kProjector) && holds(ModuleName::kVisionEncoder)) {
      const auto encoder = std::find_if(out.modules.begin(), out.modules.end(), [](const PlacedModule& placed) {
        return placed.module == ModuleName::kVisionEncoder;
      });
      out.modules.insert(encoder + 1, {ModuleName::kProjector, encoder->layout});
      out.reasons.emplace_back("projector: with the vision encoder, since no pool is given for it");
    }
  }

  absl::Status plan_counts(const PoolSpec& pool, const std::vector<const ModuleSpec*>& modules, PoolPlan& out) const {
    const ModuleSpec* counted = nullptr;  // the module that says how many instances there are
    const bool backbone = find(modules, ModuleName::kBackbone) != nullptr;
    for (const ModuleSpec* module : modules) {
      if (!module->replicas.has_value()) continue;
      if (backbone && module->module != ModuleName::kBackbone) {
        return invalid(where(module->where, "replicas"), ": on the LLM's pool ", std::string(name_of(module->module)),
                       " runs inside each LLM instance; leave it out, or give it a pool of its own");
      }
      if (counted != nullptr && counted->replicas != module->replicas) {
        return invalid(where(module->where, "replicas"), " (", *module->replicas, ") must be ", *counted->replicas,
                       ", that of ", std::string(name_of(counted->module)), ": each instance of ", pool.name,
                       " holds all modules placed there");
      }
      counted = module;
    }
    out.min_instances = pool.min_instances;
    out.instances = counted != nullptr ? *counted->replicas : std::max<int64_t>(1, pool.min_instances);
    out.max_instances = pool.max_instances.value_or(out.instances);
    if (counted == nullptr) {
      out.reasons.push_back(absl::StrCat("instances: ", out.instances, ", min_instances, since no replicas are given"));
    }
    if (out.instances < out.min_instances || out.instances > out.max_instances) {
      const std::string place =
          counted != nullptr ? where(counted->where, "replicas") : where(pool.where, "max_instances");
      return invalid(place, " (", out.instances, ") must be between the pool's min_instances (", out.min_instances,
                     ") and max_instances (", out.max_instances, ")");
    }
    const int64_t needed = out.max_instances * out.devices_an_instance;
    out.devices = pool.devices.value_or(needed);
    if (needed <= out.devices) return absl::OkStatus();
    return invalid(where(pool.where, "devices"), " (", out.devices, ") must be at least ", needed, ": ",
                   out.max_instances, " instances (max_instances) of ", out.devices_an_instance,
                   out.devices_an_instance == 1 ? " device" : " devices");
  }

  int64_t bytes_of(ModuleName module) const {
    switch (module) {
      case ModuleName::kVisionEncoder:
        return bytes_.vision_encoder;
      case ModuleName::kProjector:
        return bytes_.projector;
      case ModuleName::kBackbone:
        return bytes_.backbone;
      case ModuleName::kAudioEncoder:
        break;
    }
    return 0;
  }

  // Of the backbone on one device: where stages differ, the largest.
  int64_t largest_stage(const ModuleLayout& layout) const {
    int64_t out = 0;
    const auto stages = split_layers(spec_.backbone.layers, layout.pp);
    PARVL_CHECK(stages.ok(), "a pipeline that does not fit the layers was not refused");
    for (const StagePart& stage : *stages) {
      out = std::max(out, backbone_bytes(spec_, dtype_, {layout.tp, 0, stage}));
    }
    return out;
  }

  absl::Status check_memory(const PoolSpec& pool, PoolPlan& out) const {
    for (const PlacedModule& placed : out.modules) {
      const ModuleLayout& layout = placed.layout;
      const int64_t parts = layout.tp * layout.pp;
      const bool backbone = placed.module == ModuleName::kBackbone;
      out.weight_bytes += backbone ? largest_stage(layout) : (bytes_of(placed.module) + parts - 1) / parts;
    }
    const double memory_gb = allocation_.device_classes.at(pool.device).memory_gb;
    if (memory_gb == 0 || static_cast<double>(out.weight_bytes) <= memory_gb * 1e9) return absl::OkStatus();
    return invalid(where(pool.where, "device"), ": a device of an instance of ", pool.name, " must hold ",
                   bytes_text(out.weight_bytes), " of weights, and ", pool.device, " has ", memory_gb,
                   " GB; raise tp_size or pp_size, or move a module to another pool");
  }

  absl::StatusOr<PoolPlan> plan_pool(const PoolSpec& pool) const {
    const std::vector<const ModuleSpec*> modules = modules_of(pool);
    PoolPlan out;
    out.name = pool.name;
    out.device = pool.device;
    out.role = role_of(pool);
    PARVL_RETURN_IF_ERROR(plan_modules(modules, out));
    add_unplaced(out);
    PARVL_RETURN_IF_ERROR(plan_counts(pool, modules, out));
    PARVL_RETURN_IF_ERROR(check_memory(pool, out));
    return out;
  }

  const Allocation& allocation_;
  const ModelSpec& spec_;
  const DType dtype_;
  const WeightBytes bytes_;
};

}  // namespace

absl::StatusOr<PlacementPlan> place(const Allocation& allocation, const ModelSpec& spec, DType dtype) {
  return Planner(allocation, spec, dtype).run();
}

absl::StatusOr<std::map<std::string, std::string>> parse_device_map(const std::string& text,
                                                                    const Allocation& allocation) {
  std::map<std::string, std::string> out;
  if (text.empty()) return out;
  std::vector<std::string> classes;
  for (const auto& [name, device] : allocation.device_classes) classes.push_back(name);
  for (const std::string& entry : std::vector<std::string>(absl::StrSplit(text, ','))) {
    const size_t equals = entry.find('=');
    const std::string name = entry.substr(0, equals),
                      device = equals == std::string::npos ? "" : entry.substr(equals + 1);
    if (std::find(classes.begin(), classes.end(), name) == classes.end()) {
      return invalid("--device-map names the device class '", name, "', which ", allocation.file,
                     " does not; its classes: ", absl::StrJoin(classes, ", "));
    }
    if (device != "cpu" && device != "cuda") {
      return invalid("--device-map ", name, "=", device, ": must be cpu or cuda, as in ", name, "=cpu");
    }
    if (!out.emplace(name, device).second) return invalid("--device-map names ", name, " twice");
  }
  return out;
}

}  // namespace parvl
