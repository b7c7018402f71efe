#include "parvl/plan/cost/traffic.h"

#include <map>

namespace parvl {

const char* to_string(Call call) {
  switch (call) {
    case Call::kAllReduce:
      return "all_reduce";
    case Call::kReduceScatter:
      return "reduce_scatter";
    case Call::kAllGather:
      return "all_gather";
    case Call::kSend:
      return "send";
  }
  return "?";
}

int64_t sent_bytes(Call call, int64_t bytes, int64_t ranks) {
  if (call == Call::kSend) return bytes;
  const int64_t times = (call == Call::kAllReduce ? 2 : 1) * (ranks - 1);
  return (times * bytes + ranks - 1) / ranks;
}

std::vector<Traffic> data_parallel_traffic(const std::vector<int64_t>& groups, const DataParallel& shape) {
  if (shape.ranks == 1 || groups.empty()) return {};
  std::map<Call, Traffic> of;
  const auto add = [&](Call call, int64_t bytes) {
    Traffic& traffic = of[call];
    traffic.call = call;
    ++traffic.calls;
    traffic.bytes += bytes;
    traffic.sent += sent_bytes(call, bytes, shape.ranks);
  };
  for (const int64_t values : groups) {
    if (shape.zero == 0) {
      add(Call::kAllReduce, values * dtype_bytes(shape.master));
      continue;
    }
    const int64_t padded = (values + shape.ranks - 1) / shape.ranks * shape.ranks;
    add(Call::kReduceScatter, padded * dtype_bytes(shape.master));
    add(Call::kAllReduce, dtype_bytes(DType::kFloat64));
    add(Call::kAllGather, padded * dtype_bytes(shape.value));
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
