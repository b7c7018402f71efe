// The order of a step's work on each rank of a pipeline, as data: who computes, sends and receives what, and when.
// Built here, proved in schedule_check.h, timed in execution.h, carried out by the trainer. Pure.
//
// A rank here is one stage of one pipeline (one data-parallel replica of the LLM): its tensor- and context-parallel
// ranks all do the same list, each with its own group of every name. What is proved of the list holds for them: to go
// through it in step is one way for them to run, and if one way ends, all do (execution.h). A message between the
// encoder and the first stage is one to or from each of them, in their order; an exchange is among all of them.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "parvl/plan/pipeline/stages.h"

namespace parvl {

// The vision encoder (and the projector, where it lies on the encoder's ranks) as the stage before the first.
inline constexpr int64_t kEncoderStage = -1;

enum class ActionKind {
  kForward,
  kBackward,  // gradients of the input and of the weights
  kBackwardInput,
  kBackwardWeight,  // what backward_input kept back: for schedules that fill bubbles with it
  kSend,
  kReceive,
  kExchange,    // among all stages of a replica: visual rows to the first stage, or their gradients back
  kReduceTied,  // the tied embedding's gradient, summed over the first and the last stage
  kRelease,     // frees what the stage holds of the micro batch; outputs that were sent are the message's own
};

// Of stage s: its output goes to stage s + 1, the gradient of its input to stage s − 1.
enum class Payload { kOutput, kGradient };

struct Action {
  ActionKind kind = ActionKind::kForward;
  int64_t stage = 0;  // whose forward, whose output; the rank's own also in a message (in kExchange: kEncoderStage)
  int64_t microbatch = 0;              // its index in the shape; −1 in kReduceTied
  Payload payload = Payload::kOutput;  // of a message or exchange
  int64_t peer = -1;                   // the other rank of a message

  bool is_message() const { return kind == ActionKind::kSend || kind == ActionKind::kReceive; }
  bool is_collective() const { return kind == ActionKind::kExchange || kind == ActionKind::kReduceTied; }
  friend auto operator<=>(const Action&, const Action&) = default;
};
// "send the output of stage 0, micro batch 2, to rank 1": after "waits to".
std::string describe(const Action& action);

enum class EncoderPlace { kNone, kOwnRanks, kAllRanks };

struct Microbatch {
  int64_t replica = 0;
  // Who holds images of it: numbers of the encoder's own ranks or, when it runs over all ranks, stages. Empty: no
  // image.
  std::vector<int64_t> encoders;
};

// What a schedule is made for. All of it is known to every rank from the recipe and the batch's metadata.
struct PipelineShape {
  int64_t stages = 1;
  int64_t replicas = 1;
  EncoderPlace encoder = EncoderPlace::kNone;
  int64_t encoder_ranks = 0;  // of its own
  // The freeze plan's flags: what runs at kEncoderStage, and each stage. A projector that runs in the first stage
  // counts there.
  bool encoder_trained = false;
  std::vector<bool> stage_trained;  // empty: all of them
  bool tied = false;                // the output matrix is the embedding, and trained
  // In the order of the step, the replicas in turn. Those without a token to learn may be left out.
  std::vector<Microbatch> microbatches;
};

// The freeze plan of one micro batch: without images the encoder is no piece of it.
PieceBackward stage_backward(const PipelineShape& shape, int64_t stage, int64_t microbatch);

struct RankSchedule {
  int64_t replica = 0;           // −1: a rank of the encoder's own, which serves all replicas
  int64_t stage = 0;             // kEncoderStage: likewise
  int64_t encoder = -1;          // its number among the micro batches' `encoders`; −1: it encodes nothing
  int64_t max_live = 0;          // micro batches whose activations of `stage` it may hold at once
  int64_t max_live_encoded = 0;  // and of the encoder, beside them
  std::vector<Action> actions;
};

// Interleaved and zero-bubble schedules will be other lists of the same actions.
struct PipelineSchedule {
  PipelineShape shape;
  std::vector<RankSchedule> ranks;  // the stages of replica 0, of replica 1, …, then the encoder's own ranks
  int64_t rank_of(int64_t replica, int64_t stage) const { return replica * shape.stages + stage; }
  int64_t encoder_rank(int64_t encoder) const { return shape.replicas * shape.stages + encoder; }
  // The ranks that take part in a collective action of `rank`, ascending.
  std::vector<int64_t> members(int64_t rank, const Action& action) const;
};

// One forward, one backward (Narayanan et al., "PipeDream", SOSP 2019; without its stale weights: Megatron-LM, SC
// 2021). Stage s runs stages − 1 − s forwards ahead, then a forward and a backward in turn, so it holds the activations
// of at most stages − s micro batches; any number of micro batches.
//
// The encoder on its own ranks is one more stage before the first, served to the replicas in turn: it holds at most
// stages · replicas + 1 micro batches. Over all ranks it is done with all micro batches before the pipeline starts, and
// goes backward when the pipeline has ended: each rank then holds the encoder's activations of the step's images that
// are its own, micro batches / ranks of one micro batch's, in exchange for which no rank waits for another's images
// but once, and the pipeline's bubbles stay as they are. Recomputation in the encoder keeps only its pixels.
//
// Before a stage sends a gradient upstream it takes the next micro batch from there: its neighbour hands that over
// first and only then waits for the gradient, so no two ranks ever wait to send to each other, even where a send ends
// only when it is received. Without loss: the neighbour is computing that micro batch until then.
//
// InvalidArgument for a shape that is none.
absl::StatusOr<PipelineSchedule> make_1f1b(const PipelineShape& shape);

// A line a rank, for people and tests: "0: F0 o0>1 F1 o1>1 g0<1 B0 -0". F forward, B backward, I and W its halves, "-"
// release; o an output and g a gradient, to (>) or from (<) a rank, or exchanged (x); E is the encoder's, T the tied
// sum.
std::string to_text(const PipelineSchedule& schedule);

}  // namespace parvl
