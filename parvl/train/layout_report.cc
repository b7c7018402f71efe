#include "parvl/train/layout_report.h"

#include <absl/strings/match.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

#include <algorithm>

#include "parvl/plan/cost/fit.h"
#include "parvl/plan/pipeline/messages.h"

namespace parvl {
namespace {

class Report {
 public:
  Report(const Layout& layout, const StepMicrobatches& microbatches) : layout_(layout), microbatches_(microbatches) {}

  absl::StatusOr<std::vector<GroupTraffic>> rows() {
    for (const std::vector<StepMicrobatch>& replica : microbatches_) {
      PARVL_ASSIGN_OR_RETURN(schedules_.emplace_back(), layout_.schedule({replica}));
    }
    for (const GroupSpec& group : layout_.mesh().groups) {
      const size_t dot = group.name.find('.');
      const std::string module = group.name.substr(0, dot);
      const std::string rest = dot == std::string::npos ? "" : group.name.substr(dot + 1);
      if (module == "world") add(group, group.ranks, world_traffic(layout_.mesh().world));
      if (rest.starts_with("tp[")) tensor(group, module);
      if (rest.starts_with("data[")) data(group, module);
      if (rest.starts_with("images.")) image_messages(group);
      if (module != "llm_backbone") continue;
      if (rest.starts_with("model[") && !layout_.encoder_apart()) images(group);
      if (rest.starts_with("tied[")) tied(group);
      if (rest.starts_with("pp[")) messages(group, rest);
    }
    return std::move(rows_);
  }

 private:
  void add(const GroupSpec& group, const std::vector<int64_t>& ranks, const std::vector<Traffic>& traffic) {
    for (const Traffic& one : traffic) {
      if (one.calls > 0) rows_.push_back({group.name, ranks, one});
    }
  }

  const std::vector<StepMicrobatch>& microbatches_of(int64_t rank) const {
    return microbatches_[static_cast<size_t>(layout_.replica_of(rank))];
  }

  void data(const GroupSpec& group, const std::string& module) {
    std::vector<int64_t> values;
    for (const FlatTensor& tensor : layout_.part(group.ranks.front()).trained) {
      if (tensor.module == module) values.push_back(tensor.values);
    }
    const DataParallel shape{static_cast<int64_t>(group.ranks.size()), layout_.recipe().parallel.zero, layout_.master(),
                             layout_.dtype()};
    add(group, group.ranks, data_parallel_traffic(values, shape));
  }

  void tensor(const GroupSpec& group, const std::string& module) {
    const int64_t rank = group.ranks.front();
    std::vector<Traffic> all;
    for (const std::vector<StepMicrobatch>& replica : layout_.microbatches_of(rank, microbatches_)) {
      for (const StepMicrobatch& microbatch : replica) {
        const std::vector<Traffic> one = rows_of(module, rank, microbatch);
        all.insert(all.end(), one.begin(), one.end());
      }
    }
    std::vector<SharedTensor> shared;
    for (const FlatTensor& tensor : layout_.part(rank).trained) {
      const bool same = tensor.parts == 1 || tensor.copies > 1;
      if (tensor.module == module && same) shared.push_back({layout_.padded(tensor), tensor.parts});
    }
    const auto gradients = shared_gradient_traffic(shared, static_cast<int64_t>(group.ranks.size()), layout_.master());
    all.insert(all.end(), gradients.begin(), gradients.end());
    add(group, group.ranks, add_up(all));
  }

  // What a micro batch's rows are for in a module's tensor group.
  std::vector<Traffic> rows_of(const std::string& module, int64_t rank, const StepMicrobatch& microbatch) const {
    const Layout::Pieces pieces = layout_.pieces(layout_.stage_of(rank), microbatch);
    const TensorCut cut = layout_.cut(module);
    if (module == "llm_backbone") {
      return backbone_tensor_traffic(layout_.model().backbone, layout_.stage(rank), pieces.stage,
                                     {microbatch.tokens, 0, microbatch.targets}, cut);
    }
    if (!microbatch.has_images()) return {};
    const int64_t first = layout_.place_of(rank) / cut.ranks;
    if (module == "vision_encoder") {
      return vision_tensor_traffic(*layout_.model().vision, pieces.vision,
                                   microbatch.patches[static_cast<size_t>(first)], cut);
    }
    const std::vector<int64_t> merged = layout_.merged_rows(microbatch);
    const auto begin = merged.begin() + first * cut.ranks;
    return projector_tensor_traffic(layout_.model(), pieces.projector, *std::max_element(begin, begin + cut.ranks),
                                    cut);
  }

  void images(const GroupSpec& group) {
    std::vector<Traffic> all;
    TensorCut replica = layout_.cut("llm_backbone");
    replica.ranks = static_cast<int64_t>(group.ranks.size());
    for (const StepMicrobatch& microbatch : microbatches_of(group.ranks.front())) {
      if (!microbatch.has_images()) continue;
      const std::vector<int64_t> merged = layout_.merged_rows(microbatch);
      const auto one = image_exchange_traffic(layout_.model(), layout_.vision_trained(),
                                              *std::max_element(merged.begin(), merged.end()), replica);
      all.insert(all.end(), one.begin(), one.end());
    }
    add(group, group.ranks, add_up(all));
  }

  // The pair of a first stage's rank and an encoder's own, one direction: "images.4>0".
  void image_messages(const GroupSpec& group) {
    const int64_t llm = group.ranks[0], encoder = group.ranks[1];
    const bool back = group.name == image_group(llm, encoder);
    if (back && !layout_.vision_trained()) return;
    const std::vector<StageTensor> tensors = stage_tensors(layout_.model(), kEncoderStage, layout_.dtype());
    Traffic all{TrafficKind::kSend, 0, 0, 0};
    for (const StepMicrobatch& microbatch : microbatches_of(llm)) {
      if (!microbatch.has_images()) continue;
      const int64_t rows = layout_.merged_rows(microbatch)[static_cast<size_t>(layout_.place_of(encoder))];
      const int64_t bytes = message_bytes(stage_messages(tensors, {microbatch.tokens, rows, 0}, 1, 0));
      all.calls += bytes > 0 ? 1 : 0;  // one without rows is not sent
      all.bytes += bytes;
    }
    all.sent = all.bytes;
    add(group, back ? std::vector<int64_t>{llm, encoder} : std::vector<int64_t>{encoder, llm}, {all});
  }

  void tied(const GroupSpec& group) {
    const int64_t bytes = layout_.tied_values(group.ranks.front()) * dtype_bytes(layout_.master());
    if (bytes == 0) return;
    add(group, group.ranks, {{TrafficKind::kAllReduce, 1, bytes, sent_bytes(TrafficKind::kAllReduce, bytes, 2)}});
  }

  // The pair of a pipeline's stages, one direction: "pp[0].1>2".
  void messages(const GroupSpec& group, const std::string& name) {
    const size_t dot = name.find('.'), arrow = name.find('>');
    const int64_t from = std::stoll(name.substr(dot + 1, arrow - dot - 1)), to = std::stoll(name.substr(arrow + 1));
    const int64_t rank = group.ranks.front();
    const std::vector<StepMicrobatch>& microbatches = microbatches_of(rank);
    const std::vector<StageTensor> tensors = stage_tensors(layout_.model(), std::min(from, to), layout_.dtype());
    const RankGrid& grid = layout_.backbone().grid;
    const auto bytes = [&](int64_t, int64_t microbatch) {
      return message_bytes(stage_messages(tensors, {microbatches[static_cast<size_t>(microbatch)].tokens, 0, 0},
                                          grid.size("tp"), grid.coordinate(rank, "tp")));
    };
    const PipelineSchedule& schedule = schedules_[static_cast<size_t>(layout_.replica_of(rank))];
    for (const PeerTraffic& peer : pipeline_traffic(schedule, from, bytes)) {
      if (peer.peer != to) continue;
      std::vector<int64_t> ranks = group.ranks;
      if (from > to) std::reverse(ranks.begin(), ranks.end());
      add(group, ranks, {{TrafficKind::kSend, peer.calls, peer.bytes, peer.bytes}});
    }
  }

  const Layout& layout_;
  const StepMicrobatches& microbatches_;
  std::vector<PipelineSchedule> schedules_;  // of each replica
  std::vector<GroupTraffic> rows_;
};

}  // namespace

absl::StatusOr<std::vector<GroupTraffic>> step_traffic(const Layout& layout, const StepMicrobatches& microbatches) {
  return Report(layout, microbatches).rows();
}

std::string traffic_table(const std::vector<GroupTraffic>& rows) {
  std::string out =
      absl::StrFormat("%-28s  %-16s  %-14s  %5s  %12s  %12s\n", "group", "ranks", "call", "calls", "bytes", "sent");
  int64_t sent = 0;
  for (const GroupTraffic& row : rows) {
    const Traffic& traffic = row.traffic;
    const bool message = traffic.call == TrafficKind::kSend;
    absl::StrAppendFormat(&out, "%-28s  %-16s  %-14s  %5d  %12s  %12s\n", row.group,
                          absl::StrJoin(row.ranks, message ? " > " : " "), to_string(traffic.call), traffic.calls,
                          bytes_text(traffic.bytes), bytes_text(traffic.sent));
    sent += traffic.sent * (message ? 1 : static_cast<int64_t>(row.ranks.size()));
  }
  absl::StrAppend(&out, "all ranks together send ", bytes_text(sent), " a step\n");
  return out;
}

std::string bytes_table(const std::vector<RankBytes>& ranks) {
  std::string out = absl::StrFormat("rank  %12s  %12s  %12s  %12s  %12s\n", "weights", "gradients", "optimizer",
                                    "activations", "together");
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankBytes& one = ranks[rank];
    absl::StrAppendFormat(&out, "%4d  %12s  %12s  %12s  %12s  %12s\n", rank, bytes_text(one.weights),
                          bytes_text(one.gradients), bytes_text(one.optimizer), bytes_text(one.activations),
                          bytes_text(one.total()));
  }
  return out;
}

}  // namespace parvl
