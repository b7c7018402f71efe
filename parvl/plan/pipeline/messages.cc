#include "parvl/plan/pipeline/messages.h"

#include <algorithm>

#include "parvl/plan/pipeline/schedule.h"

namespace parvl {

RowRange row_chunk(int64_t rows, int64_t parts, int64_t part) {
  const int64_t chunk = (rows + parts - 1) / parts, begin = std::min(rows, part * chunk);
  return {begin, std::min(chunk, rows - begin)};
}

std::vector<StageTensor> stage_tensors(const ModelSpec& spec, int64_t edge, DType dtype) {
  const int64_t hidden = spec.backbone.hidden;
  if (edge == kEncoderStage) return {{"visual", StageTensor::Rows::kVisual, hidden, dtype, /*split=*/false}};
  return {{"hidden", StageTensor::Rows::kTokens, hidden, dtype, /*split=*/true}};
}

std::vector<StageMessage> stage_messages(const std::vector<StageTensor>& tensors, const MicrobatchRows& rows,
                                         int64_t tp, int64_t tp_rank) {
  std::vector<StageMessage> out;
  for (const StageTensor& tensor : tensors) {
    const int64_t all = tensor.rows == StageTensor::Rows::kTokens ? rows.tokens : rows.visual_tokens;
    const int64_t mine = tensor.split ? row_chunk(all, tp, tp_rank).count : all;
    out.push_back({tensor.name, mine, tensor.columns, tensor.dtype});
  }
  return out;
}

int64_t message_bytes(const std::vector<StageMessage>& messages) {
  int64_t out = 0;
  for (const StageMessage& message : messages) out += message.bytes();
  return out;
}

}  // namespace parvl
