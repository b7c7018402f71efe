#include "parvl/comm/mesh_plan.h"

#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

#include <algorithm>
#include <utility>

namespace parvl {
namespace {

constexpr const char* kAxes[] = {"tp", "sp", "dp", "pp"};

ModuleMesh make_mesh(const std::string& module, const ModuleLayout& layout, int64_t first) {
  ModuleMesh out;
  out.module = module;
  out.grid = RankGrid({{"tp", layout.tp}, {"sp", layout.sp}, {"dp", layout.dp}, {"pp", layout.pp}}, first);
  out.experts = RankGrid(
      {{"tp", layout.tp}, {"ep", layout.ep}, {"edp", layout.dp * layout.sp / layout.ep}, {"pp", layout.pp}}, first);
  out.own_ranks = layout.ranks > 0;
  return out;
}

void add_groups(const std::string& name, const std::vector<std::vector<int64_t>>& groups, std::vector<GroupSpec>& out) {
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].size() > 1) out.push_back({absl::StrCat(name, "[", i, "]"), groups[i]});
  }
}

// A pair and direction each, so that no message waits behind another's.
void add_stage_pairs(const ModuleMesh& mesh, std::vector<GroupSpec>& out) {
  const auto pipelines = mesh.grid.groups({"pp"});
  for (size_t i = 0; i < pipelines.size(); ++i) {
    const std::vector<int64_t>& ranks = pipelines[i];
    for (size_t stage = 0; stage + 1 < ranks.size(); ++stage) {
      const std::vector<int64_t> pair = {ranks[stage], ranks[stage + 1]};
      out.push_back({absl::StrCat(mesh.module, ".pp[", i, "].", stage, ">", stage + 1), pair});
      out.push_back({absl::StrCat(mesh.module, ".pp[", i, "].", stage + 1, ">", stage), pair});
    }
    // From the last stage to the first: what is tied across them.
    if (ranks.size() > 1) out.push_back({absl::StrCat(mesh.module, ".tied[", i, "]"), {ranks.front(), ranks.back()}});
  }
}

// Every encoder rank of its own with every rank of the first stages, a pair and direction each: which of them have a
// message for each other, images decide.
void add_image_pairs(const ModuleMesh& encoder, const ModuleMesh& llm, std::vector<GroupSpec>& out) {
  for (int64_t from = encoder.grid.first(); from < encoder.grid.first() + encoder.grid.size(); ++from) {
    for (const int64_t to : llm.grid.group_of(llm.grid.first(), {"tp", "sp", "dp"})) {
      out.push_back({image_group(from, to), {to, from}});
      out.push_back({image_group(to, from), {to, from}});
    }
  }
}

absl::Status check(const std::string& module, const ModuleLayout& layout, int64_t covered) {
  if (layout.dp * layout.sp % layout.ep != 0) {
    return invalid(module, ": ep (", layout.ep, ") must divide dp · sp (", layout.dp * layout.sp, ")");
  }
  if (layout.product() == covered) return absl::OkStatus();
  return invalid(module, ": dp · tp · pp · sp is ", layout.product(), ", but the module covers ", covered,
                 layout.ranks > 0 ? " ranks of its own" : " ranks of llm_backbone");
}

}  // namespace

const ModuleMesh* MeshPlan::find(const std::string& module) const {
  const auto found =
      std::find_if(modules.begin(), modules.end(), [&](const ModuleMesh& m) { return m.module == module; });
  return found == modules.end() ? nullptr : &*found;
}

std::string image_group(int64_t from, int64_t to) { return absl::StrCat("vision_encoder.images.", from, ">", to); }

absl::StatusOr<MeshPlan> plan_mesh(const ParallelSpec& spec, const std::vector<std::string>& modules) {
  const int64_t llm_ranks = spec.llm.product();
  PARVL_RETURN_IF_ERROR(check("llm_backbone", spec.llm, llm_ranks));
  MeshPlan out;
  out.modules.push_back(make_mesh("llm_backbone", spec.llm, 0));
  out.world = llm_ranks;
  const std::pair<const char*, const std::optional<ModuleLayout>*> others[] = {
      {"vision_encoder", &spec.vision_encoder}, {"audio_encoder", &spec.audio_encoder}, {"projector", &spec.projector}};
  for (const auto& [name, given] : others) {
    const bool has = std::find(modules.begin(), modules.end(), name) != modules.end();
    if (!has && given->has_value()) return invalid(name, " has a layout, but the model has no such module");
    if (!has) continue;
    ModuleLayout layout;
    layout.dp = llm_ranks;
    if (given->has_value()) layout = **given;
    const ModuleMesh* encoder = out.find("vision_encoder");
    if (!given->has_value() && std::string(name) == "projector" && encoder != nullptr && encoder->own_ranks) {
      layout.dp = layout.ranks = encoder->grid.size();
      out.modules.push_back(make_mesh(name, layout, encoder->grid.first()));
      continue;
    }
    PARVL_RETURN_IF_ERROR(check(name, layout, layout.ranks > 0 ? layout.ranks : llm_ranks));
    out.modules.push_back(make_mesh(name, layout, layout.ranks > 0 ? out.world : 0));
    out.world += layout.ranks;
  }
  std::vector<int64_t> all;
  for (int64_t rank = 0; rank < out.world; ++rank) all.push_back(rank);
  if (out.world > 1) out.groups.push_back({"world", all});
  for (const ModuleMesh& mesh : out.modules) {
    for (const char* axis : {"tp", "sp"}) add_groups(mesh.module + "." + axis, mesh.grid.groups({axis}), out.groups);
    // Ranks with the same part of the weights; and with the same samples.
    add_groups(mesh.module + ".data", mesh.grid.groups({"sp", "dp"}), out.groups);
    add_groups(mesh.module + ".model", mesh.grid.groups({"tp", "sp", "pp"}), out.groups);
    if (mesh.experts.size("ep") > 1) {
      for (const char* axis : {"ep", "edp"}) {
        add_groups(mesh.module + "." + axis, mesh.experts.groups({axis}), out.groups);
      }
    }
    add_stage_pairs(mesh, out.groups);
  }
  const ModuleMesh* encoder = out.find("vision_encoder");
  if (encoder != nullptr && encoder->own_ranks) add_image_pairs(*encoder, out.modules.front(), out.groups);
  return out;
}

std::string rank_table(const MeshPlan& plan) {
  std::string out;
  const auto end_line = [&out] {
    while (out.back() == ' ') out.pop_back();
    out += '\n';
  };
  out += "rank";
  for (const ModuleMesh& mesh : plan.modules) absl::StrAppendFormat(&out, "  %-28s", mesh.module + " (tp sp dp pp)");
  end_line();
  for (int64_t rank = 0; rank < plan.world; ++rank) {
    absl::StrAppendFormat(&out, "%4d", rank);
    for (const ModuleMesh& mesh : plan.modules) {
      std::vector<int64_t> at;
      for (const char* axis : kAxes) {
        if (mesh.grid.contains(rank)) at.push_back(mesh.grid.coordinate(rank, axis));
      }
      absl::StrAppendFormat(&out, "  %-28s", at.empty() ? "-" : absl::StrJoin(at, " "));
    }
    end_line();
  }
  return out;
}

}  // namespace parvl
