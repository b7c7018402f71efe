// Schedules in words and in short.
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "parvl/plan/pipeline/schedule.h"

namespace parvl {
namespace {

std::string whose(const Action& action) {
  return action.stage == kEncoderStage ? "the encoder" : absl::StrCat("stage ", action.stage);
}

std::string short_text(const Action& action) {
  const std::string of = absl::StrCat(action.stage == kEncoderStage ? "E" : "", action.microbatch);
  const char* const payload = action.payload == Payload::kOutput ? "o" : "g";
  switch (action.kind) {
    case ActionKind::kForward:
      return "F" + of;
    case ActionKind::kBackward:
      return "B" + of;
    case ActionKind::kBackwardInput:
      return "I" + of;
    case ActionKind::kBackwardWeight:
      return "W" + of;
    case ActionKind::kRelease:
      return "-" + of;
    case ActionKind::kReduceTied:
      return "T";
    case ActionKind::kExchange:
      return absl::StrCat(payload, action.microbatch, "x");
    case ActionKind::kSend:
      return absl::StrCat(payload, action.microbatch, ">", action.peer);
    case ActionKind::kReceive:
      return absl::StrCat(payload, action.microbatch, "<", action.peer);
  }
  return "?";
}

}  // namespace

std::string describe(const Action& action) {
  const std::string of = absl::StrCat(" of ", whose(action), ", micro batch ", action.microbatch);
  // A message is named by its sender's stage: what a stage receives is its neighbour's.
  const bool output = action.payload == Payload::kOutput;
  const int64_t from = action.kind != ActionKind::kReceive ? action.stage : action.stage + (output ? -1 : 1);
  const std::string message = absl::StrCat(output ? "the output" : "the gradient", " of ",
                                           from == kEncoderStage ? "the encoder" : absl::StrCat("stage ", from),
                                           ", micro batch ", action.microbatch);
  switch (action.kind) {
    case ActionKind::kForward:
      return "run the forward" + of;
    case ActionKind::kBackward:
      return "run the backward" + of;
    case ActionKind::kBackwardInput:
      return "run the backward of the input" + of;
    case ActionKind::kBackwardWeight:
      return "run the backward of the weights" + of;
    case ActionKind::kRelease:
      return "release what is held" + of;
    case ActionKind::kReduceTied:
      return "sum the tied embedding's gradient";
    case ActionKind::kExchange:
      return absl::StrCat("exchange the images' ", output ? "visual rows" : "gradients", ", micro batch ",
                          action.microbatch);
    case ActionKind::kSend:
      return absl::StrCat("send ", message, ", to rank ", action.peer);
    case ActionKind::kReceive:
      return absl::StrCat("receive ", message, ", from rank ", action.peer);
  }
  return "?";
}

std::string to_text(const PipelineSchedule& schedule) {
  std::string out;
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const auto append = [](std::string* text, const Action& action) { absl::StrAppend(text, short_text(action)); };
    absl::StrAppend(&out, rank, ": ", absl::StrJoin(schedule.ranks[rank].actions, " ", append), "\n");
  }
  return out;
}

}  // namespace parvl
