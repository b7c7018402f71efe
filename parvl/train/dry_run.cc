#include "parvl/train/dry_run.h"

#include <algorithm>

#include "parvl/base/file.h"
#include "parvl/plan/balance.h"

namespace parvl {
namespace {

constexpr int64_t kImageSide = 32;  // patches

absl::StatusOr<ModelSpec> read_spec(const Recipe& recipe) {
  if (!recipe.model.empty()) return load_model_spec(recipe.model);
  PARVL_ASSIGN_OR_RETURN(const Json config, read_json_file(recipe.config));
  return parse_model_spec(config, recipe.config);
}

// Patches a side of the image that each sample is taken to have.
int64_t image_side(const Layout& layout) {
  const int64_t merge = layout.model().vision->merge, tokens = layout.recipe().data.max_length;
  int64_t side = kImageSide / merge * merge;
  while (side > merge && side / merge * (side / merge) > tokens) side -= merge;
  return side;
}

std::string assumption(const Layout& layout, const StepMicrobatches& microbatches) {
  const DataRecipe& data = layout.recipe().data;
  std::string out =
      absl::StrCat("Assumed of each of a replica's ", microbatches[0].size(), " micro batches: ", data.micro_batch,
                   " samples of ", data.max_length, " tokens (data.max_length), all but the first to learn");
  if (layout.model().vision) {
    const int64_t side = image_side(layout);
    absl::StrAppend(&out, ", each with an image of ", side, " x ", side, " patches");
  }
  return out + ".\n";
}

Json to_json(const Layout& layout, const StepMicrobatches& microbatches, const std::vector<RankBytes>& bytes,
             const std::vector<GroupTraffic>& traffic) {
  Json ranks = Json::array(), calls = Json::array();
  for (int64_t rank = 0; rank < layout.mesh().world; ++rank) {
    const RankBytes& one = bytes[static_cast<size_t>(rank)];
    Json modules = Json::object();
    for (const ModuleMesh& mesh : layout.mesh().modules) {
      if (!mesh.grid.contains(rank)) continue;
      for (const MeshAxis& axis : mesh.grid.axes()) {
        modules[mesh.module][axis.name] = mesh.grid.coordinate(rank, axis.name);
      }
    }
    ranks.push_back({{"rank", rank},
                     {"modules", modules},
                     {"weights", one.weights},
                     {"gradients", one.gradients},
                     {"optimizer", one.optimizer},
                     {"activations", one.activations}});
  }
  for (const GroupTraffic& row : traffic) {
    calls.push_back({{"group", row.group},
                     {"ranks", row.ranks},
                     {"call", to_string(row.traffic.call)},
                     {"calls", row.traffic.calls},
                     {"bytes", row.traffic.bytes},
                     {"sent", row.traffic.sent}});
  }
  const StepMicrobatch& first = microbatches[0][0];
  Json assumed = {{"micro_batches", microbatches[0].size()},
                  {"tokens", first.tokens},
                  {"targets", first.targets},
                  {"image_patches", 0}};
  if (layout.model().vision) assumed["image_patches"] = image_side(layout) * image_side(layout);
  return {{"assumed", assumed}, {"ranks", ranks}, {"traffic", calls}};
}

}  // namespace

StepMicrobatches largest_microbatches(const Layout& layout) {
  const DataRecipe& data = layout.recipe().data;
  StepMicrobatch one;
  one.tokens = data.micro_batch * data.max_length;
  one.targets = std::max<int64_t>(1, one.tokens - data.micro_batch);
  const int64_t count = data.global_batch / (data.micro_batch * layout.replicas());
  StepMicrobatches out(static_cast<size_t>(layout.replicas()),
                       std::vector<StepMicrobatch>(static_cast<size_t>(count), one));
  if (!layout.model().vision) return out;
  const auto groups = static_cast<size_t>(layout.encoding_ranks() / layout.cut("vision_encoder").ranks);
  const int64_t side = image_side(layout);
  const std::vector<double> images(static_cast<size_t>(data.micro_batch), static_cast<double>(side * side));
  std::vector<double> load(groups, 0);
  for (int64_t turn = 0; turn < count; ++turn) {
    for (std::vector<StepMicrobatch>& replica : out) {
      std::vector<int64_t>& patches = replica[static_cast<size_t>(turn)].patches;
      patches.assign(groups, 0);
      // Only an encoder's own ranks make up for what earlier micro batches left uneven.
      if (!layout.encoder_apart()) load.assign(groups, 0);
      for (const int64_t group : spread_onto(images, load)) patches[static_cast<size_t>(group)] += side * side;
    }
  }
  return out;
}

absl::StatusOr<DryRun> dry_run(const Recipe& recipe) {
  PARVL_ASSIGN_OR_RETURN(const ModelSpec spec, read_spec(recipe));
  Recipe whole = recipe;
  PARVL_ASSIGN_OR_RETURN(whole.data.max_length, max_length_of(recipe.data, spec.backbone.max_positions));
  PARVL_ASSIGN_OR_RETURN(const Layout layout, Layout::create(spec, whole));
  const StepMicrobatches microbatches = largest_microbatches(layout);
  std::vector<RankBytes> bytes;
  for (int64_t rank = 0; rank < layout.mesh().world; ++rank) {
    PARVL_ASSIGN_OR_RETURN(bytes.emplace_back(), layout.bytes(rank, microbatches));
  }
  PARVL_ASSIGN_OR_RETURN(const std::vector<GroupTraffic> traffic, step_traffic(layout, microbatches));
  DryRun out;
  out.text =
      absl::StrCat(rank_table(layout.mesh()), "\n", assumption(layout, microbatches),
                   "Activations are what is kept for the backward; what a layer needs while it runs comes on top.\n\n",
                   bytes_table(bytes));
  if (layout.mesh().world > 1) absl::StrAppend(&out.text, "\n", traffic_table(traffic));
  out.json = to_json(layout, microbatches, bytes, traffic);
  return out;
}

}  // namespace parvl
