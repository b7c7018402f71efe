// What the ranks of a training step say to each other, by formula: calls and bytes. What is counted is what a rank
// passes to a ProcessGroup; tests hold the formulas against counters.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "parvl/plan/model_spec.h"
#include "parvl/plan/pipeline/schedule.h"

namespace parvl {

enum class CallKind { kAllReduce, kReduceScatter, kAllGather, kSend };
const char* to_string(CallKind call);  // "all_reduce", as ProcessGroup's functions

// Calls of one kind by one rank in one group.
struct Traffic {
  CallKind call = CallKind::kAllReduce;
  int64_t calls = 0;
  int64_t bytes = 0;  // of the calls' buffers; of a gather or scatter the whole tensor, not the rank's part
  int64_t sent = 0;   // by the rank, where the backend is as good as a ring
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

// Bytes that each of `ranks` must send for a call on `bytes`, rounded up: (n − 1)/n of the tensor for a reduce-scatter
// or all-gather, twice that for an all-reduce, which is one after the other; no algorithm sends less (Patarasuk and
// Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
int64_t sent_bytes(CallKind call, int64_t bytes, int64_t ranks);

// One step of data parallelism over `ranks`, per rank. `groups`: the values of each of its optimizer's flat tensors
// (parameters of one module, learning rate and weight decay).
// Gradients are summed in the master's type. zero 0: one all-reduce a flat tensor. zero 1 (Rajbhandari et al., "ZeRO",
// SC 2020: the same bytes): each is padded to a multiple of `ranks`, reduce-scattered, updated in parts and gathered in
// the type that the forward reads; and its part of the gradient's norm, one float64, is summed. Empty for one rank.
struct DataParallel {
  int64_t ranks = 1, zero = 0;
  DType master = DType::kFloat32, value = DType::kFloat32;
};
std::vector<Traffic> data_parallel_traffic(const std::vector<int64_t>& groups, const DataParallel& shape);

// What one rank of a schedule sends to another: activations forward, or gradients back.
struct PeerTraffic {
  int64_t peer = 0;
  int64_t calls = 0, bytes = 0;
  friend bool operator==(const PeerTraffic&, const PeerTraffic&) = default;
};
// `message_bytes`: of the output of a stage (or kEncoderStage) for a micro batch, as message_bytes(stage_messages(…));
// its gradient has as many. A bundle counts as one call for each tensor: `tensors` of them. With equal micro batches of
// T tokens and hidden rows alone, each of the p − 1 borders carries m · T · H values down and as many up (Narayanan et
// al., Megatron-LM, SC 2021, § 4.1), over all its tensor-parallel ranks together.
std::vector<PeerTraffic> pipeline_traffic(
    const PipelineSchedule& schedule, int64_t rank,
    const std::function<int64_t(int64_t stage, int64_t microbatch)>& message_bytes, int64_t tensors = 1);

}  // namespace parvl
