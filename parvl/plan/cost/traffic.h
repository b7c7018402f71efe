// What the ranks of a training step say to each other, by formula: calls and bytes. What is counted is what a rank
// passes to a ProcessGroup; tests hold the formulas against counters.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "parvl/plan/model_spec.h"
#include "parvl/plan/pipeline/messages.h"
#include "parvl/plan/pipeline/schedule.h"

namespace parvl {

enum class TrafficKind { kAllReduce, kReduceScatter, kAllGather, kSend };
const char* to_string(TrafficKind call);  // "all_reduce", as ProcessGroup's functions

// Calls of one kind by one rank in one group.
struct Traffic {
  TrafficKind call = TrafficKind::kAllReduce;
  int64_t calls = 0;
  int64_t bytes = 0;  // of the calls' buffers; of a gather or scatter the whole tensor, not the rank's part
  int64_t sent = 0;   // by the rank, where the backend is as good as a ring
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

// Bytes that each of `ranks` must send for a call on `bytes`, rounded up: (n − 1)/n of the tensor for a reduce-scatter
// or all-gather, twice that for an all-reduce, which is one after the other; no algorithm sends less (Patarasuk and
// Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
int64_t sent_bytes(TrafficKind call, int64_t bytes, int64_t ranks);

// One step of data parallelism over `ranks`, per rank. `groups`: the values of each of its optimizer's flat tensors
// (parameters of one module, learning rate and weight decay).
// Gradients are summed in the master's type. zero 0: an all-reduce for each gradient_values_at_once() of a flat tensor.
// zero 1 (Rajbhandari et al., "ZeRO", SC 2020: the same bytes): each is padded to a multiple of `ranks`,
// reduce-scattered, updated in parts and gathered in the type that the forward reads. Empty for one rank.
struct DataParallel {
  int64_t ranks = 1, zero = 0;
  DType master = DType::kFloat32, value = DType::kFloat32;
};
int64_t gradient_values_at_once();
std::vector<Traffic> data_parallel_traffic(const std::vector<int64_t>& groups, const DataParallel& shape);

// Tensor parallelism with cut rows (nn/tensor_parallel.h; Korthikanti et al., 2022, section 4.2.2), per rank and micro
// batch. Rows are filled up to `ranks` equal parts. A layer gathers them before its two first matrices and scatters
// sums after its two second ones; the backward of one is the other, so a layer whose graph is kept moves 8 · rows ·
// hidden values a micro batch, and with recomputation, which runs its forward again, 12. All of that is empty for one
// rank.
//
// `pieces`: what is trained, as plan_backward gives it for the modules' pieces in order. A piece without a graph moves
// its forward's rows only. Assumed: where the first piece with a graph has nothing trained before it, its first norm is
// trained; if not, its first gather has no backward, one call less.
struct TensorCut {
  int64_t ranks = 1;
  DType value = DType::kFloat32;  // of activations
  bool recompute = false;
};
// In the group "llm_backbone.tp", of a stage: `pieces` are the embedding (first stage), its layers, the loss (last
// stage). The embedding sums each rank's words' rows; the loss gathers the rows, and of its logits only the rows'
// maxima, then two sums a row are reduced, in float32 (float64 for float64), a chunk of rows at a time.
std::vector<Traffic> backbone_tensor_traffic(const BackboneSpec& spec, const StagePart& part,
                                             const std::vector<PieceBackward>& pieces, const MicrobatchRows& rows,
                                             const TensorCut& cut);
// In "vision_encoder.tp", for the patches that the group encodes: `pieces` are the patch embedding, which needs no
// call, and the blocks. Nothing without patches.
std::vector<Traffic> vision_tensor_traffic(const VisionSpec& spec, const std::vector<PieceBackward>& pieces,
                                           int64_t patches, const TensorCut& cut);
// In "projector.tp", for ranks with up to `most_rows` merged rows each.
std::vector<Traffic> projector_tensor_traffic(const ModelSpec& spec, const PieceBackward& piece, int64_t most_rows,
                                              const TensorCut& cut);
// In "llm_backbone.model": the images' embeddings from all ranks of a replica to all, of up to `most_rows` each; back
// come their gradients where something before is trained. Not made again by recomputation.
std::vector<Traffic> image_exchange_traffic(const ModelSpec& spec, bool trained, int64_t most_rows,
                                            const TensorCut& replica);
// Rows of logits that the loss computes at once.
int64_t loss_rows_at_once(int64_t vocab);

// Once a step in a module's tensor group: the gradients of flat tensors that several of its ranks hold the same part of
// (`parts` parts: norms and biases with one, key heads that are copied with several), `values` each with what ZeRO-1
// fills up. With several parts the buffer has room for all of them.
struct SharedTensor {
  int64_t values = 0, parts = 1;
};
std::vector<Traffic> shared_gradient_traffic(const std::vector<SharedTensor>& tensors, int64_t ranks, DType master);

// Once a step among all ranks: targets and tokens, loss and operations, the gradient's norm (float64 each); and before
// the update a word of each, that they made the same calls (comm/checked_group.h). On GPUs a barrier too.
std::vector<Traffic> world_traffic(int64_t ranks);

// Calls of one kind together.
std::vector<Traffic> add_up(const std::vector<Traffic>& traffic);

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
