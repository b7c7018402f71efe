// Which ranks a layout has, where each module lies on them, and the groups in which they talk. Pure: every rank
// computes the same plan and makes the groups in its order.
#pragma once

#include <string>
#include <vector>

#include "parvl/base/parallel_spec.h"
#include "parvl/base/status.h"
#include "parvl/comm/rank_grid.h"

namespace parvl {

struct ModuleMesh {
  std::string module;  // llm_backbone, vision_encoder, audio_encoder, projector
  // Axes tp, sp, dp, pp, fastest first; and over the same ranks tp, ep, edp, pp: the ranks that hold different experts,
  // and those that hold the same.
  RankGrid grid, experts;
  bool own_ranks = false;
};

// Ranks that communicate, ascending, at least two.
struct GroupSpec {
  std::string name;  // unique: "llm_backbone.tp[0]", "llm_backbone.pp[0].1>2", "vision_encoder.images.4>0"
  std::vector<int64_t> ranks;
};

struct MeshPlan {
  int64_t world = 1;
  std::vector<ModuleMesh> modules;  // the LLM first
  std::vector<GroupSpec> groups;    // in the order in which all ranks make them

  const ModuleMesh* find(const std::string& module) const;  // null: the model has none
};

// The messages of an encoder rank to a rank of the LLM's first stage ("4>0", ranks of the world), or back ("0>4").
std::string image_group(int64_t from, int64_t to);

// `modules`: what the model has beside the LLM. A projector without a layout lies on the vision encoder's ranks.
// Refused: a module whose degrees do not cover its ranks, experts that do not divide dp · sp, a module with a layout
// that the model lacks.
absl::StatusOr<MeshPlan> plan_mesh(const ParallelSpec& spec, const std::vector<std::string>& modules);

// A line a rank: where each module's part on it lies. "rank  llm_backbone (tp sp dp pp)  vision_encoder (…)".
std::string rank_table(const MeshPlan& plan);

}  // namespace parvl
