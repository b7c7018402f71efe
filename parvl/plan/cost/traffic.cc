#include "parvl/plan/cost/traffic.h"

#include <algorithm>
#include <map>

namespace parvl {

const char* to_string(TrafficKind call) {
  switch (call) {
    case TrafficKind::kAllReduce:
      return "all_reduce";
    case TrafficKind::kReduceScatter:
      return "reduce_scatter";
    case TrafficKind::kAllGather:
      return "all_gather";
    case TrafficKind::kSend:
      return "send";
  }
  return "?";
}

int64_t sent_bytes(TrafficKind call, int64_t bytes, int64_t ranks) {
  if (call == TrafficKind::kSend) return bytes;
  const int64_t times = (call == TrafficKind::kAllReduce ? 2 : 1) * (ranks - 1);
  return (times * bytes + ranks - 1) / ranks;
}

namespace {

// The calls of one rank in a group of so many, by kind.
class Calls {
 public:
  explicit Calls(int64_t ranks) : ranks_(ranks) {}
  void add(TrafficKind call, int64_t bytes, int64_t times = 1) {
    if (ranks_ == 1 || bytes == 0 || times == 0) return;
    Traffic& traffic = of_[call];
    traffic.call = call;
    traffic.calls += times;
    traffic.bytes += times * bytes;
    traffic.sent += times * sent_bytes(call, bytes, ranks_);
  }
  std::vector<Traffic> take() const {
    std::vector<Traffic> out;
    for (const auto& [call, traffic] : of_) out.push_back(traffic);
    return out;
  }

 private:
  int64_t ranks_;
  std::map<TrafficKind, Traffic> of_;
};

// Rows of a cut module, on their way through one of its pieces.
class CutRows {
 public:
  // `most`: rows of the rank that has most.
  CutRows(const TensorCut& cut, int64_t most) : cut_(cut), rows_(cut.ranks * most), calls_(cut.ranks) {}

  int64_t forwards(const PieceBackward& piece) const { return cut_.recompute && piece.keeps_graph() ? 2 : 1; }
  // Gathered forward; scattered sums backward.
  void gather(const PieceBackward& piece, int64_t columns, bool back) {
    move(TrafficKind::kAllGather, TrafficKind::kReduceScatter, piece, columns, back);
  }
  void scatter(const PieceBackward& piece, int64_t columns, bool back) {
    move(TrafficKind::kReduceScatter, TrafficKind::kAllGather, piece, columns, back);
  }
  void layer(const PieceBackward& piece, int64_t columns) {
    for (int i = 0; i < 2; ++i) {
      gather(piece, columns, piece.keeps_graph());
      scatter(piece, columns, piece.keeps_graph());
    }
  }
  Calls& calls() { return calls_; }

 private:
  void move(TrafficKind forward, TrafficKind backward, const PieceBackward& piece, int64_t columns, bool back) {
    const int64_t bytes = rows_ * columns * dtype_bytes(cut_.value);
    calls_.add(forward, bytes, forwards(piece));
    if (back) calls_.add(backward, bytes);
  }
  TensorCut cut_;
  int64_t rows_;
  Calls calls_;
};

DType wide(DType value) { return value == DType::kFloat64 ? value : DType::kFloat32; }

}  // namespace

std::vector<Traffic> data_parallel_traffic(const std::vector<int64_t>& groups, const DataParallel& shape) {
  Calls calls(shape.ranks);
  for (const int64_t values : groups) {
    if (shape.zero == 0) {
      for (int64_t begin = 0; begin < values; begin += gradient_values_at_once()) {
        calls.add(TrafficKind::kAllReduce,
                  std::min(gradient_values_at_once(), values - begin) * dtype_bytes(shape.master));
      }
      continue;
    }
    const int64_t padded = (values + shape.ranks - 1) / shape.ranks * shape.ranks;
    calls.add(TrafficKind::kReduceScatter, padded * dtype_bytes(shape.master));
    calls.add(TrafficKind::kAllGather, padded * dtype_bytes(shape.value));
  }
  return calls.take();
}

// 128 MB of float32: enough for the full rate of links between GPUs, and little next to a model's gradients.
int64_t gradient_values_at_once() { return int64_t{32} << 20; }

int64_t loss_rows_at_once(int64_t vocab) { return std::max<int64_t>(1, (int64_t{16} << 20) / vocab); }

std::vector<Traffic> backbone_tensor_traffic(const BackboneSpec& spec, const StagePart& part,
                                             const std::vector<PieceBackward>& pieces, const MicrobatchRows& rows,
                                             const TensorCut& cut) {
  CutRows cut_rows(cut, row_chunk(rows.tokens, cut.ranks, 0).count);
  size_t next = 0;
  if (part.embedding) {
    const PieceBackward& embedding = pieces[next++];
    cut_rows.scatter(embedding, spec.hidden, embedding.weight_grad);
  }
  for (int64_t i = 0; i < part.layers; ++i) cut_rows.layer(pieces[next++], spec.hidden);
  if (!part.head) return cut_rows.calls().take();
  const PieceBackward& loss = pieces[next];
  cut_rows.gather(loss, spec.hidden, loss.input_grad);
  const int64_t at_once = loss_rows_at_once(spec.vocab), bytes = dtype_bytes(wide(cut.value));
  for (int64_t begin = 0; begin < rows.targets; begin += at_once) {
    const int64_t count = std::min(at_once, rows.targets - begin);
    cut_rows.calls().add(TrafficKind::kAllReduce, count * bytes, cut_rows.forwards(loss));
    cut_rows.calls().add(TrafficKind::kAllReduce, 2 * count * bytes, cut_rows.forwards(loss));
  }
  return cut_rows.calls().take();
}

std::vector<Traffic> vision_tensor_traffic(const VisionSpec& spec, const std::vector<PieceBackward>& pieces,
                                           int64_t patches, const TensorCut& cut) {
  const int64_t unit = spec.merge * spec.merge;
  CutRows rows(cut, row_chunk(patches / unit, cut.ranks, 0).count * unit);
  for (size_t i = 1; i < pieces.size(); ++i) rows.layer(pieces[i], spec.hidden);
  return rows.calls().take();
}

std::vector<Traffic> projector_tensor_traffic(const ModelSpec& spec, const PieceBackward& piece, int64_t most_rows,
                                              const TensorCut& cut) {
  CutRows rows(cut, most_rows);
  rows.gather(piece, spec.vision->hidden * spec.vision->merge * spec.vision->merge, piece.keeps_graph());
  rows.scatter(piece, spec.backbone.hidden, piece.keeps_graph());
  return rows.calls().take();
}

std::vector<Traffic> image_exchange_traffic(const ModelSpec& spec, bool trained, int64_t most_rows,
                                            const TensorCut& replica) {
  CutRows rows({replica.ranks, replica.value, /*recompute=*/false}, most_rows);
  rows.gather({trained, false}, spec.backbone.hidden, trained);
  return rows.calls().take();
}

std::vector<Traffic> shared_gradient_traffic(const std::vector<SharedTensor>& tensors, int64_t ranks, DType master) {
  Calls calls(ranks);
  for (const SharedTensor& tensor : tensors) {
    calls.add(TrafficKind::kAllReduce, tensor.parts * tensor.values * dtype_bytes(master));
  }
  return calls.take();
}

std::vector<Traffic> world_traffic(int64_t ranks) {
  Calls calls(ranks);
  const int64_t one = dtype_bytes(DType::kFloat64);
  calls.add(TrafficKind::kAllReduce, 2 * one, 2);
  calls.add(TrafficKind::kAllReduce, one);
  calls.add(TrafficKind::kAllGather, ranks * one);
  return calls.take();
}

std::vector<Traffic> add_up(const std::vector<Traffic>& traffic) {
  std::map<TrafficKind, Traffic> of;
  for (const Traffic& one : traffic) {
    Traffic& sum = of[one.call];
    sum.call = one.call;
    sum.calls += one.calls;
    sum.bytes += one.bytes;
    sum.sent += one.sent;
  }
  std::vector<Traffic> out;
  for (const auto& [call, sum] : of) out.push_back(sum);
  return out;
}

std::vector<PeerTraffic> pipeline_traffic(
    const PipelineSchedule& schedule, int64_t rank,
    const std::function<int64_t(int64_t stage, int64_t microbatch)>& message_bytes, int64_t tensors) {
  std::map<int64_t, PeerTraffic> of;
  for (const Action& action : schedule.ranks[static_cast<size_t>(rank)].actions) {
    if (action.kind != ActionKind::kSend) continue;
    // A gradient has the shape of the output that the stage before gave.
    const int64_t stage = action.payload == Payload::kOutput ? action.stage : action.stage - 1;
    const int64_t bytes = message_bytes(stage, action.microbatch);
    if (bytes == 0) continue;  // not sent: its receiver knows
    PeerTraffic& traffic = of[action.peer];
    traffic.peer = action.peer;
    traffic.calls += tensors;
    traffic.bytes += bytes;
  }
  std::vector<PeerTraffic> out;
  for (const auto& [peer, traffic] : of) out.push_back(traffic);
  return out;
}

}  // namespace parvl
