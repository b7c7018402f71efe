#include "parvl/train/run_ranks.h"

#include <algorithm>

#include "parvl/base/file.h"
#include "parvl/comm/comm_site.h"
#include "parvl/nn/stage.h"
#include "parvl/nn/tensor_buffer.h"

namespace parvl {

absl::StatusOr<MeshPlan> RunRanks::plan(const ParallelSpec& spec, const ModelSpec& model, int64_t started) {
  PARVL_RETURN_IF_ERROR(split_layers(model.backbone.layers, spec.llm.pp, spec.llm.stages).status());
  std::vector<std::string> modules;
  if (model.vision.has_value()) modules = {"vision_encoder", "projector"};
  PARVL_ASSIGN_OR_RETURN(MeshPlan plan, plan_mesh(spec, modules));
  if (plan.world == started) return plan;
  return invalid("the recipe's layout has ", plan.world, plan.world == 1 ? " rank" : " ranks", ", but ", started,
                 started == 1 ? " process was" : " processes were", " started; start ", plan.world,
                 " (parvl launch --nproc-per-node ", plan.world, " -- parvl train ...), or change `parallel`");
}

absl::StatusOr<std::unique_ptr<RunRanks>> RunRanks::create(const ParallelSpec& spec, const ModelSpec& model,
                                                           Communicator* communicator, const CheckOptions& checks) {
  auto out = std::make_unique<RunRanks>(model);
  PARVL_ASSIGN_OR_RETURN(MeshPlan plan,
                         RunRanks::plan(spec, model, communicator == nullptr ? 1 : communicator->world()));
  PARVL_ASSIGN_OR_RETURN(out->parts_, split_layers(model.backbone.layers, spec.llm.pp, spec.llm.stages));
  const ModuleMesh* encoder = plan.find("vision_encoder");
  out->encoder_apart_ = encoder != nullptr && encoder->own_ranks;
  if (communicator == nullptr) return out;
  out->checked_ = std::make_unique<CheckedCommunicator>(*communicator, checks);
  PARVL_ASSIGN_OR_RETURN(out->mesh_, DeviceMesh::connect(std::move(plan), *out->checked_));
  return out;
}

BatchShare RunRanks::share(int64_t micro_batch) const {
  BatchShare out;
  out.micro_batch = micro_batch;
  if (mesh_ == nullptr) return out;
  const RankGrid& grid = llm();
  out.replica = is_encoder() ? -1 : grid.coordinate(rank(), "dp");
  out.replicas = grid.size("dp");
  return out;
}

const RankGrid& RunRanks::llm() const { return mesh_->plan().find("llm_backbone")->grid; }
const RankGrid& RunRanks::encoder() const { return mesh_->plan().find("vision_encoder")->grid; }

EncoderShare RunRanks::encoder_share() const {
  EncoderShare out;
  if (!encoder_apart_) return out;
  out.groups = encoder().size() / encoder().size("tp");
  if (is_encoder()) out.group = encoder_place(rank()) / encoder().size("tp");
  return out;
}

std::vector<int64_t> RunRanks::encoder_ranks(int64_t group) const {
  return encoder().group_of(encoder().first() + group * encoder().size("tp"), {"tp"});
}

int64_t RunRanks::encoder_place(int64_t rank) const { return rank - encoder().first(); }

std::vector<int64_t> RunRanks::first_stage(int64_t replica) const {
  return llm().group_of(llm().group_of(llm().first(), {"dp"})[static_cast<size_t>(replica)], {"tp", "sp"});
}

ProcessGroup* RunRanks::images(int64_t from, int64_t to) const { return mesh_->group(image_group(from, to)); }

ProcessGroup* RunRanks::data(Module module) const { return group(std::string(to_string(module)) + ".data"); }

ProcessGroup* RunRanks::tensor(Module module) const { return group(std::string(to_string(module)) + ".tp"); }

ProcessGroup* RunRanks::replica() const { return group("llm_backbone.model"); }

int64_t RunRanks::stage() const {
  if (mesh_ == nullptr) return 0;
  return llm().contains(rank()) ? llm().coordinate(rank(), "pp") : kEncoderStage;
}

ProcessGroup* RunRanks::between_stages(int64_t from, int64_t to) const {
  return mesh_->group(absl::StrCat("llm_backbone.pp.", from, ">", to));
}

ProcessGroup* RunRanks::tied() const { return group("llm_backbone.tied"); }

bool RunRanks::holds(const Param& param, int64_t stage) const {
  if (param.module != Module::kBackbone) return encoder_apart_ == (stage == kEncoderStage);
  if (stage == kEncoderStage) return false;
  return on_stage(param, tied_, parts_[static_cast<size_t>(stage)]);
}

bool RunRanks::trains(const ParamTable& params, int64_t stage) const {
  return std::any_of(params.all().begin(), params.all().end(), [&](const auto& param) {
    return param->trains && param->module == Module::kBackbone && holds(*param, stage);
  });
}

at::Tensor RunRanks::whole(const ParamTable& params, const Param& param, const at::Tensor& own,
                           at::TensorOptions options) const {
  const CommSite site("whole " + param.name);
  const bool in_stages = stages() > 1 && param.module == Module::kBackbone;
  int64_t owner = param.module != Module::kBackbone && encoder_apart_ ? kEncoderStage : 0;
  while (in_stages && !holds(param, owner)) ++owner;
  // The last stage's copy of a tied embedding stays as it is.
  const bool gives = own.defined() && (stage() == owner || !(in_stages || encoder_apart_));
  const at::Tensor out = gives ? params.whole(param, own).contiguous() : at::empty(param.shape, options);
  if (encoder_apart_) {
    const int64_t first =
        owner == kEncoderStage ? encoder().first() : llm().group_of(0, {"pp"})[static_cast<size_t>(owner)];
    wait(mesh_->group("world")->broadcast(buffer_of(out), first));
  } else if (in_stages) {  // a replica's ranks ascend by stage, then by tensor rank
    wait(replica()->broadcast(buffer_of(out), owner * (replica()->size() / stages())));
  }
  return out;
}

void RunRanks::sum(const at::Tensor& value) const {
  ProcessGroup* const world = group("world");
  if (world == nullptr) return;
  wait(world->all_reduce(buffer_of(value), ReduceOp::kSum));
  // So far a GPU's calls are only queued. The host waits for them here, where a rank that does not come is found, and
  // not in a copy of the result.
  if (value.is_cuda()) wait(world->barrier());
}

bool RunRanks::counts(const Param& param) const {
  if (!param.here) return false;
  if (stage() > 0 && param.module == Module::kBackbone && holds(param, 0)) return false;  // the copy of what is tied
  const ProcessGroup* cut = tensor(param.module);
  if (cut == nullptr) return true;
  return param.part.count == 1 ? cut->rank() == 0 : cut->rank() % param.part.copies == 0;
}

VisionLayout RunRanks::vision_layout() const {
  VisionLayout out;
  if (encoder_apart_) {
    out.ranks = encoder().size();
    out.rank = is_encoder() ? encoder_place(rank()) : 0;
  } else if (replica() != nullptr) {
    out.ranks = replica()->size();
    out.rank = replica()->rank();
  } else {
    return out;
  }
  out.encoder = mesh_->plan().find("vision_encoder")->grid.size("tp");
  out.projector = mesh_->plan().find("projector")->grid.size("tp");
  return out;
}

absl::Status RunRanks::sum_exactly(absl::Span<uint64_t> values) const {
  constexpr uint64_t kHalf = uint64_t{1} << 32;
  std::vector<double> halves;  // sums of which a double holds exactly
  for (const uint64_t value : values) {
    halves.push_back(static_cast<double>(value % kHalf));
    halves.push_back(static_cast<double>(value / kHalf));
  }
  PARVL_RETURN_IF_ERROR(sum(absl::MakeSpan(halves)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<uint64_t>(halves[2 * i]) + static_cast<uint64_t>(halves[2 * i + 1]) * kHalf;
  }
  return absl::OkStatus();
}

absl::Status RunRanks::sum(absl::Span<double> values) const {
  ProcessGroup* const all = group("world");
  if (all == nullptr) return absl::OkStatus();
  const CommSite site("sum");
  return all->all_reduce({values.data(), static_cast<int64_t>(values.size()), DType::kFloat64}, ReduceOp::kSum)->wait();
}

absl::StatusOr<int64_t> RunRanks::last_failed(bool mine) const {
  double last = mine ? static_cast<double>(rank()) : -1;
  ProcessGroup* const all = group("world");
  const CommSite site("agree");
  if (all != nullptr) PARVL_RETURN_IF_ERROR(all->all_reduce({&last, 1, DType::kFloat64}, ReduceOp::kMax)->wait());
  return static_cast<int64_t>(last);
}

absl::Status RunRanks::agree(const absl::Status& mine) const {
  const absl::StatusOr<int64_t> last = last_failed(!mine.ok());
  if (!mine.ok()) return mine;
  PARVL_RETURN_IF_ERROR(last.status());
  if (*last < 0) return absl::OkStatus();
  return failed("rank ", *last, " failed; its own last line says why");
}

absl::Status RunRanks::compare() const {
  ProcessGroup* const all = group("world");
  return all == nullptr ? absl::OkStatus() : checked_->compare(*all);
}

absl::Status RunRanks::expect_equal(const std::vector<std::pair<std::string, std::string>>& named,
                                    const std::string& fix) const {
  ProcessGroup* const all = group("world");
  if (all == nullptr) return absl::OkStatus();
  // A hash in parts that float64 holds exactly; equal everywhere when the largest is the smallest.
  std::vector<double> parts;
  for (const auto& [name, text] : named) {
    const std::string hash = sha256_hex(text);
    for (size_t i = 0; i < 4; ++i) parts.push_back(static_cast<double>(std::stoll(hash.substr(8 * i, 8), nullptr, 16)));
  }
  const CommSite site("expect_equal");
  std::vector<double> extremes = parts;
  for (const double part : parts) extremes.push_back(-part);
  PARVL_RETURN_IF_ERROR(
      all->all_reduce({extremes.data(), static_cast<int64_t>(extremes.size()), DType::kFloat64}, ReduceOp::kMax)
          ->wait());
  for (size_t i = 0; i < parts.size(); ++i) {
    if (extremes[i] == -extremes[parts.size() + i]) continue;
    return invalid("the ranks differ in ", named[i / 4].first, "; ", fix);
  }
  return absl::OkStatus();
}

void RunRanks::abort(const std::string& reason) const {
  if (mesh_ != nullptr) mesh_->abort(absl::StrCat("rank ", rank(), " failed: ", reason));
}

}  // namespace parvl
