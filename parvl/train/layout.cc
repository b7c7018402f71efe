#include "parvl/train/layout.h"

#include <absl/strings/match.h>

#include <algorithm>
#include <numeric>

namespace parvl {
namespace {

constexpr char kVision[] = "vision_encoder", kProjector[] = "projector", kBackbone[] = "llm_backbone";
constexpr char kEmbedding[] = "llm_backbone.embed.weight", kHead[] = "llm_backbone.head.weight";

std::vector<std::string> names_of(const ParamSpec& param) {
  std::vector<std::string> out = {param.name};
  if (!param.tied.empty()) out.push_back(param.tied);
  return out;
}

// Adds a parameter to the flat tensor that it belongs to.
void add_to(std::vector<FlatTensor>& tensors, const FlatTensor& like, int64_t values) {
  const auto key = [](const FlatTensor& t) {
    return std::tuple(t.module, t.lr, t.weight_decay, t.parts, t.copies, t.on_two_stages);
  };
  auto found =
      std::find_if(tensors.begin(), tensors.end(), [&](const FlatTensor& tensor) { return key(tensor) == key(like); });
  if (found == tensors.end()) found = tensors.insert(tensors.end(), like);
  found->values += values;
}

}  // namespace

absl::StatusOr<Layout> Layout::create(const ModelSpec& model, const Recipe& recipe) {
  Layout out;
  out.model_ = model;
  out.recipe_ = recipe;
  PARVL_ASSIGN_OR_RETURN(out.dtype_, parse_dtype(recipe.train.dtype));
  PARVL_ASSIGN_OR_RETURN(out.stages_,
                         split_layers(model.backbone.layers, recipe.parallel.llm.pp, recipe.parallel.llm.stages));
  std::vector<std::string> modules;
  if (model.vision) modules = {kVision, kProjector};
  PARVL_ASSIGN_OR_RETURN(out.mesh_, plan_mesh(recipe.parallel, modules));
  out.params_ = list_params(model);
  std::vector<std::string> names;
  for (const ParamSpec& param : out.params_) names.push_back(param.name);
  if (model.backbone.tied) names.push_back(kHead);
  PARVL_RETURN_IF_ERROR(check_patterns(recipe, names));
  for (const ParamSpec& param : out.params_) {
    out.settings_.push_back(settings_of(recipe, names_of(param), param.is_matrix()));
  }
  if (!out.trains("")) return nothing_trains();
  out.find_what_trains();
  PARVL_RETURN_IF_ERROR(out.deal_out());
  return out;
}

absl::Status Layout::deal_out() {
  ranks_.resize(static_cast<size_t>(mesh_.world));
  for (int64_t rank = 0; rank < mesh_.world; ++rank) {
    RankPart& part = ranks_[static_cast<size_t>(rank)];
    for (size_t i = 0; i < params_.size(); ++i) {
      const ParamSpec& param = params_[i];
      const ModuleMesh& mesh = *mesh_.find(param.module);
      if (!mesh.grid.contains(rank) || !on_stage(param, stage(rank))) continue;
      const absl::StatusOr<HeldPart> held = held_part(param, mesh.grid.size("tp"), mesh.grid.coordinate(rank, "tp"));
      PARVL_RETURN_IF_ERROR(with_context(held.status(), "parallel"));
      const ParamSettings& settings = settings_[i];
      if (!settings.trains) {
        part.frozen_values += held->values;
        continue;
      }
      const bool on_two_stages = !param.tied.empty() && stages() > 1;
      add_to(part.trained,
             {param.module, settings.lr, settings.weight_decay, held->parts, held->copies, on_two_stages, 0},
             held->values);
    }
  }
  return absl::OkStatus();
}

int64_t Layout::stage_of(int64_t rank) const {
  return backbone().grid.contains(rank) ? backbone().grid.coordinate(rank, "pp") : kEncoderStage;
}

int64_t Layout::replica_of(int64_t rank) const {
  return backbone().grid.contains(rank) ? backbone().grid.coordinate(rank, "dp") : -1;
}

bool Layout::encoder_apart() const {
  const ModuleMesh* encoder = mesh_.find(kVision);
  return encoder != nullptr && encoder->own_ranks;
}

int64_t Layout::encoding_ranks() const { return encoder_apart() ? mesh_.find(kVision)->grid.size() : replica_ranks(); }

StagePart Layout::part_of_stage(int64_t stage) const {
  return stage == kEncoderStage ? StagePart() : stages_[static_cast<size_t>(stage)];
}

int64_t Layout::place_of(int64_t rank) const {
  if (stage_of(rank) == kEncoderStage) return rank - mesh_.find(kVision)->grid.first();
  return backbone().grid.coordinate(rank, "tp") + backbone().grid.size("tp") * stage_of(rank);
}

TensorCut Layout::cut(const std::string& module) const {
  const ModuleMesh* const mesh = mesh_.find(module);
  return {mesh == nullptr ? 1 : mesh->grid.size("tp"), dtype_, recipe_.train.recompute == "full"};
}

int64_t Layout::data_ranks(const std::string& module) const {
  const RankGrid& grid = mesh_.find(module)->grid;
  return grid.size("dp") * grid.size("sp");
}

int64_t Layout::padded(const FlatTensor& tensor) const {
  const int64_t parts = recipe_.parallel.zero == 0 ? 1 : data_ranks(tensor.module);
  return (tensor.values + parts - 1) / parts * parts;
}

// Whether any parameter trains whose name, or that of one tied to it, begins so.
bool Layout::trains(const std::string& prefix) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!settings_[i].trains) continue;
    for (const std::string& name : names_of(params_[i])) {
      if (absl::StartsWith(name, prefix)) return true;
    }
  }
  return false;
}

void Layout::find_what_trains() {
  vision_trained_ = trains("vision_encoder.") || trains("projector.");
  if (model_.vision) {
    vision_pieces_.push_back(trains("vision_encoder.patch_embed."));
    for (int64_t i = 0; i < model_.vision->layers; ++i) {
      vision_pieces_.push_back(trains(absl::StrCat("vision_encoder.blocks.", i, ".")));
    }
    vision_pieces_.push_back(trains("projector."));
  }
  backbone_pieces_.push_back(trains(kEmbedding));
  for (int64_t i = 0; i < model_.backbone.layers; ++i) {
    backbone_pieces_.push_back(trains(absl::StrCat("llm_backbone.layers.", i, ".")));
  }
  backbone_pieces_.push_back(trains("llm_backbone.norm.") || trains(kHead));
}

bool Layout::stage_trains(int64_t stage) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    const bool here = params_[i].module == kBackbone && on_stage(params_[i], stages_[static_cast<size_t>(stage)]);
    if (here && settings_[i].trains) return true;
  }
  return false;
}

int64_t Layout::tied_values(int64_t rank) const {
  if (!model_.backbone.tied || stages() == 1 || !trains(kEmbedding)) return 0;
  if (!stage(rank).embedding && !stage(rank).head) return 0;
  const RankGrid& grid = backbone().grid;
  const auto embedding =
      std::find_if(params_.begin(), params_.end(), [](const ParamSpec& param) { return param.name == kEmbedding; });
  return held_part(*embedding, grid.size("tp"), grid.coordinate(rank, "tp"))->values;
}

Layout::Pieces Layout::pieces(int64_t stage, const StepMicrobatch& microbatch) const {
  const int64_t blocks = microbatch.has_images() ? model_.vision->layers : 0;
  std::vector<bool> trained;
  if (microbatch.has_images()) trained = vision_pieces_;
  trained.insert(trained.end(), backbone_pieces_.begin(), backbone_pieces_.end());
  const std::vector<PieceBackward> all = plan_backward(trained);
  Pieces out;
  const auto embedding = all.begin() + (microbatch.has_images() ? blocks + 2 : 0);
  if (microbatch.has_images()) {
    out.vision.assign(all.begin(), all.begin() + blocks + 1);
    out.projector = all[static_cast<size_t>(blocks) + 1];
  }
  const StagePart part = part_of_stage(stage);
  if (part.embedding) out.stage.push_back(*embedding);
  const auto first = embedding + 1 + part.first_layer;
  out.stage.insert(out.stage.end(), first, first + part.layers);
  if (part.head) out.stage.push_back(all.back());
  return out;
}

std::vector<int64_t> Layout::merged_rows(const StepMicrobatch& microbatch) const {
  std::vector<int64_t> out;
  const int64_t ranks = cut(kVision).ranks;
  for (const int64_t patches : microbatch.patches) {
    const int64_t merged = patches / (model_.vision->merge * model_.vision->merge);
    for (int64_t rank = 0; rank < ranks; ++rank) out.push_back(row_chunk(merged, ranks, rank).count);
  }
  return out;
}

StepMicrobatches Layout::microbatches_of(int64_t rank, const StepMicrobatches& all) const {
  const int64_t replica = replica_of(rank);
  return replica < 0 ? all : StepMicrobatches{all[static_cast<size_t>(replica)]};
}

absl::StatusOr<PipelineSchedule> Layout::schedule(const StepMicrobatches& replicas) const {
  PipelineShape shape;
  shape.stages = stages();
  shape.replicas = static_cast<int64_t>(replicas.size());
  const bool apart = encoder_apart(), encodes = model_.vision && (stages() > 1 || apart);
  shape.encoder = apart ? EncoderPlace::kOwnRanks : encodes ? EncoderPlace::kAllRanks : EncoderPlace::kNone;
  shape.encoder_ranks = apart ? encoding_ranks() / cut(kVision).ranks : 0;
  shape.encoder_trained = encodes && vision_trained();
  for (int64_t s = 0; s < stages(); ++s) {
    shape.stage_trained.push_back(stage_trains(s) || (!encodes && vision_trained()));
  }
  shape.tied = model_.backbone.tied && trains(kEmbedding);
  // Each encoder of the schedule is so many ranks of those that encode: a stage, or a group of the encoder's own.
  const int64_t together = apart ? cut(kVision).ranks : replica_ranks() / stages();
  for (int64_t replica = 0; replica < shape.replicas; ++replica) {
    for (const StepMicrobatch& microbatch : replicas[static_cast<size_t>(replica)]) {
      Microbatch& one = shape.microbatches.emplace_back();
      one.replica = replica;
      if (!encodes) continue;
      const std::vector<int64_t> rows = merged_rows(microbatch);
      for (size_t first = 0; first < rows.size(); first += static_cast<size_t>(together)) {
        const auto begin = rows.begin() + static_cast<int64_t>(first);
        const bool any = std::any_of(begin, begin + together, [](int64_t count) { return count > 0; });
        if (any) one.encoders.push_back(static_cast<int64_t>(first) / together);
      }
    }
  }
  return make_1f1b(shape);
}

absl::StatusOr<RankBytes> Layout::bytes(int64_t rank, const StepMicrobatches& microbatches) const {
  RankBytes out;
  const int64_t value = dtype_bytes(dtype_), wide = dtype_bytes(master());
  int64_t states = recipe_.optim.name == "adamw" ? 2 : recipe_.optim.momentum != 0 ? 1 : 0;
  if (dtype_ != master()) ++states;
  out.weights = part(rank).frozen_values * value;
  for (const FlatTensor& tensor : part(rank).trained) {
    const int64_t values = padded(tensor), parts = recipe_.parallel.zero == 0 ? 1 : data_ranks(tensor.module);
    out.weights += values * value;
    out.gradients += values * wide;
    out.optimizer += values / parts * states * wide;
  }
  PARVL_ASSIGN_OR_RETURN(out.activations, activations(rank, microbatches_of(rank, microbatches)));
  return out;
}

int64_t Layout::image_activations(int64_t rank, const StepMicrobatch& microbatch) const {
  const std::vector<int64_t> merged = merged_rows(microbatch);
  const TensorCut encoder = cut(kVision), projector = cut(kProjector);
  const int64_t place = place_of(rank), first = place / projector.ranks * projector.ranks;
  VisionRows vision;
  vision.patches = microbatch.patches[static_cast<size_t>(place / encoder.ranks)];
  if (replica_ranks() > 1 && !encoder_apart()) vision.given = merged[static_cast<size_t>(place)];
  for (int64_t i = 0; i < projector.ranks; ++i) vision.merged += merged[static_cast<size_t>(first + i)];
  return vision_activations(model_, vision, encoder, projector);
}

absl::StatusOr<int64_t> Layout::activations(int64_t rank, const StepMicrobatches& replicas) const {
  PARVL_ASSIGN_OR_RETURN(const PipelineSchedule one, schedule(replicas));
  const TensorCut llm = cut(kBackbone);
  HeldActivations held;
  if (stage_of(rank) == kEncoderStage) {
    held.live = one.ranks[static_cast<size_t>(one.encoder_rank(place_of(rank) / cut(kVision).ranks))].max_live_encoded;
    for (const std::vector<StepMicrobatch>& replica : replicas) {
      for (const StepMicrobatch& microbatch : replica) {
        if (!microbatch.has_images() || !vision_trained()) continue;
        held.microbatch = std::max(held.microbatch, image_activations(rank, microbatch));
      }
    }
    return held.total();
  }
  held.live = one.ranks[static_cast<size_t>(stage_of(rank))].max_live;
  for (const StepMicrobatch& microbatch : replicas[0]) {
    const Pieces here = pieces(stage_of(rank), microbatch);
    const std::vector<int64_t> merged = merged_rows(microbatch);
    const MicrobatchRows rows{microbatch.tokens, std::accumulate(merged.begin(), merged.end(), int64_t{0}),
                              microbatch.targets};
    int64_t kept = stage_activations(model_.backbone, stage(rank), here.stage, rows, llm);
    // The embeddings as they came, and in the order of the images.
    const bool images_come = encoder_apart() && stage(rank).embedding && vision_trained();
    if (images_come) kept += rows.visual_tokens * model_.backbone.hidden * dtype_bytes(dtype_);
    held.microbatch = std::max(held.microbatch, kept);
    if (stage(rank).head) held.loss = std::max(held.loss, loss_activations(model_.backbone, rows, llm));
    if (llm.recompute) {
      held.layer = std::max(held.layer, layer_activations(model_.backbone, rows.tokens, {llm.ranks, llm.value, false}));
    }
    if (!microbatch.has_images() || !vision_trained() || encoder_apart()) continue;
    const int64_t images = image_activations(rank, microbatch);
    // Several stages encode all images first and go back last.
    held.images = stages() > 1 ? held.images + images : std::max(held.images, images);
  }
  return held.total();
}

}  // namespace parvl
