// What the stages of a pipeline send each other. No shape is ever sent: both sides derive it from the micro batch's
// metadata, which every rank of a replica has. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parvl/plan/model_spec.h"

namespace parvl {

// Rows of a tensor that are cut over ranks: part r of `parts` has rows begin … begin + count − 1. Chunks of
// ceil(rows / parts), so the last ones may be short or empty.
struct RowRange {
  int64_t begin = 0, count = 0;
  friend bool operator==(const RowRange&, const RowRange&) = default;
};
RowRange row_chunk(int64_t rows, int64_t parts, int64_t part);

// One tensor of the bundle that crosses a border between stages.
struct StageTensor {
  enum class Rows { kTokens, kVisual };
  std::string name;  // in the bundle: "hidden", "visual"; later "deepstack.0", …
  Rows rows = Rows::kTokens;
  int64_t columns = 0;
  DType dtype = DType::kFloat32;  // of the tensor and of its gradient
  bool split = true;              // its rows are cut over the tensor-parallel ranks; else each has all of them
};
// The bundle that goes from stage `edge` to the next, in order: from the encoder (kEncoderStage) the projector's
// "visual" rows, which every tensor-parallel rank of the first stage gets whole; between stages of the LLM "hidden".
std::vector<StageTensor> stage_tensors(const ModelSpec& spec, int64_t edge, DType dtype);

struct MicrobatchRows {
  int64_t tokens = 0;         // of all its sequences
  int64_t visual_tokens = 0;  // of its images, those on the sender where it is one of several encoders
  int64_t targets = 0;        // tokens to learn: rows of logits
};

struct StageMessage {
  std::string name;
  int64_t rows = 0, columns = 0;
  DType dtype = DType::kFloat32;
  int64_t bytes() const { return rows * columns * dtype_bytes(dtype); }
  friend bool operator==(const StageMessage&, const StageMessage&) = default;
};
// One message a tensor, in the bundle's order, as tensor-parallel rank `tp_rank` of `tp` sends it to the same rank of
// the next stage, and gets its gradient back. One without rows is not sent: its receiver makes it itself.
std::vector<StageMessage> stage_messages(const std::vector<StageTensor>& tensors, const MicrobatchRows& rows,
                                         int64_t tp, int64_t tp_rank);
// All of them together.
int64_t message_bytes(const std::vector<StageMessage>& messages);

}  // namespace parvl
