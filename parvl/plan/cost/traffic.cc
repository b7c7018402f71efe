#include "parvl/plan/cost/traffic.h"

#include <map>

namespace parvl {

const char* to_string(CallKind call) {
  switch (call) {
    case CallKind::kAllReduce:
      return "all_reduce";
    case CallKind::kReduceScatter:
      return "reduce_scatter";
    case CallKind::kAllGather:
      return "all_gather";
    case CallKind::kSend:
      return "send";
  }
  return "?";
}

int64_t sent_bytes(CallKind call, int64_t bytes, int64_t ranks) {
  if (call == CallKind::kSend) return bytes;
  const int64_t times = (call == CallKind::kAllReduce ? 2 : 1) * (ranks - 1);
  return (times * bytes + ranks - 1) / ranks;
}

std::vector<Traffic> data_parallel_traffic(const std::vector<int64_t>& groups, const DataParallel& shape) {
  if (shape.ranks == 1 || groups.empty()) return {};
  std::map<CallKind, Traffic> of;
  const auto add = [&](CallKind call, int64_t bytes) {
    Traffic& traffic = of[call];
    traffic.call = call;
    ++traffic.calls;
    traffic.bytes += bytes;
    traffic.sent += sent_bytes(call, bytes, shape.ranks);
  };
  for (const int64_t values : groups) {
    if (shape.zero == 0) {
      add(CallKind::kAllReduce, values * dtype_bytes(shape.master));
      continue;
    }
    const int64_t padded = (values + shape.ranks - 1) / shape.ranks * shape.ranks;
    add(CallKind::kReduceScatter, padded * dtype_bytes(shape.master));
    add(CallKind::kAllReduce, dtype_bytes(DType::kFloat64));
    add(CallKind::kAllGather, padded * dtype_bytes(shape.value));
  }
  std::vector<Traffic> out;
  for (const auto& [call, traffic] : of) out.push_back(traffic);
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
    PeerTraffic& traffic = of[action.peer];
    traffic.peer = action.peer;
    traffic.calls += tensors;
    traffic.bytes += message_bytes(stage, action.microbatch);
  }
  std::vector<PeerTraffic> out;
  for (const auto& [peer, traffic] : of) out.push_back(traffic);
  return out;
}

}  // namespace parvl
