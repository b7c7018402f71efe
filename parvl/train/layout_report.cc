#include "parvl/train/layout_report.h"

#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

#include <algorithm>

#include "parvl/plan/cost/fit.h"
#include "parvl/plan/cost/values.h"
#include "parvl/plan/pipeline/messages.h"

namespace parvl {
namespace {

class Report {
 public:
  Report(const MeshPlan& plan, const LayoutStep& step) : plan_(plan), step_(step) {
    for (const GroupSpec& group : plan.groups) {
      const size_t dot = group.name.find('.');
      const ModuleMesh* const mesh = plan.find(group.name.substr(0, dot));
      if (mesh == nullptr) continue;
      const std::string rest = group.name.substr(dot + 1);
      if (rest.starts_with("data[")) data(group, *mesh);
      if (rest.starts_with("tied[")) tied(group, *mesh);
      // The pair of a pipeline's stages, both directions one after the other: "pp[0].1>2", "pp[0].2>1".
      if (rest.starts_with("pp[")) {
        const auto [from, to] = stages_of(rest);
        messages(group, *mesh, from, to);
      }
    }
  }
  std::vector<GroupTraffic> rows() { return std::move(rows_); }

 private:
  // "pp[I].A>B" → A, B.
  static std::pair<int64_t, int64_t> stages_of(const std::string& name) {
    const size_t dot = name.find('.'), arrow = name.find('>');
    return {std::stoll(name.substr(dot + 1, arrow - dot - 1)), std::stoll(name.substr(arrow + 1))};
  }

  void add(const GroupSpec& group, std::vector<int64_t> ranks, const Traffic& traffic) {
    if (traffic.calls > 0) rows_.push_back({group.name, std::move(ranks), traffic});
  }

  DType dtype() const { return step_.model.dtype; }
  DType master() const { return dtype() == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

  void data(const GroupSpec& group, const ModuleMesh& mesh) {
    const DataParallel shape{static_cast<int64_t>(group.ranks.size()), step_.parallel.zero, master(), dtype()};
    for (const Traffic& traffic : data_parallel_traffic(step_.trained(mesh.module, group.ranks.front()), shape)) {
      add(group, group.ranks, traffic);
    }
  }

  void tied(const GroupSpec& group, const ModuleMesh& mesh) {
    if (step_.tied_values == 0 || mesh.module != "llm_backbone") return;
    const int64_t bytes = step_.tied_values * dtype_bytes(master());
    add(group, group.ranks, {CallKind::kAllReduce, 1, bytes, sent_bytes(CallKind::kAllReduce, bytes, 2)});
  }

  // One replica's schedule; the others' are the same. Every micro batch has images, where the model takes any.
  PipelineSchedule schedule(const ModuleMesh& mesh, int64_t rank) const {
    PipelineShape shape;
    shape.stages = mesh.grid.size("pp");
    shape.microbatches.resize(static_cast<size_t>(step_.microbatches));
    if (step_.model.vision) {
      shape.encoder = EncoderPlace::kAllRanks;
      for (Microbatch& microbatch : shape.microbatches) microbatch.encoders = {0};
    }
    for (const char* module : {"vision_encoder", "projector"}) {
      const ModuleMesh* const other = plan_.find(module);
      if (other != nullptr && !step_.trained(module, other->grid.first()).empty()) shape.encoder_trained = true;
    }
    for (const int64_t of_stage : mesh.grid.group_of(rank, {"pp"})) {
      shape.stage_trained.push_back(!step_.trained(mesh.module, of_stage).empty());
    }
    return *make_1f1b(shape);
  }

  void messages(const GroupSpec& group, const ModuleMesh& mesh, int64_t from, int64_t to) {
    if (mesh.module != "llm_backbone") return;
    const std::vector<StageTensor> tensors = stage_tensors(step_.model, std::min(from, to), dtype());
    const int64_t bytes = message_bytes(stage_messages(tensors, {step_.tokens, 0}, mesh.grid.size("tp"),
                                                       mesh.grid.coordinate(group.ranks.front(), "tp")));
    const PipelineSchedule one = schedule(mesh, group.ranks.front());
    for (const PeerTraffic& peer : pipeline_traffic(one, from, [bytes](int64_t, int64_t) { return bytes; })) {
      if (peer.peer != to || bytes == 0) continue;
      std::vector<int64_t> ranks = group.ranks;
      if (from > to) std::reverse(ranks.begin(), ranks.end());
      add(group, ranks, {CallKind::kSend, peer.calls, peer.bytes, peer.bytes});
    }
  }

  const MeshPlan& plan_;
  const LayoutStep& step_;
  std::vector<GroupTraffic> rows_;
};

}  // namespace

std::vector<GroupTraffic> step_traffic(const MeshPlan& plan, const LayoutStep& step) {
  return Report(plan, step).rows();
}

std::string traffic_table(const std::vector<GroupTraffic>& rows) {
  std::string out =
      absl::StrFormat("%-28s  %-16s  %-14s  %5s  %12s  %12s\n", "group", "ranks", "call", "calls", "bytes", "sent");
  int64_t sent = 0;
  for (const GroupTraffic& row : rows) {
    const Traffic& traffic = row.traffic;
    const bool message = traffic.call == CallKind::kSend;
    absl::StrAppendFormat(&out, "%-28s  %-16s  %-14s  %5d  %12s  %12s\n", row.group,
                          absl::StrJoin(row.ranks, message ? " > " : " "), to_string(traffic.call), traffic.calls,
                          bytes_text(traffic.bytes), bytes_text(traffic.sent));
    sent += traffic.sent * (message ? 1 : static_cast<int64_t>(row.ranks.size()));
  }
  absl::StrAppend(&out, "all ranks together send ", bytes_text(sent), " a step\n");
  return out;
}

std::vector<int64_t> values_without_tp(const MeshPlan& plan, const LayoutStep& step, const std::string& module,
                                       int64_t rank) {
  const ModuleMesh* const mesh = plan.find(module);
  if (mesh == nullptr || !mesh->grid.contains(rank)) return {};
  const ValueCounts counts = value_counts(step.model);
  if (module == "vision_encoder") return {counts.vision_encoder};
  if (module == "projector") return {counts.projector};
  const int64_t stages = mesh->grid.size("pp");
  const auto parts = split_layers(counts.layers, stages, step.parallel.llm.stages);
  if (!parts.ok()) return {};
  return {stage_values(counts, (*parts)[static_cast<size_t>(mesh->grid.coordinate(rank, "pp"))])};
}

}  // namespace parvl
