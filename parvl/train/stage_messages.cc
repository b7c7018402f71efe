#include "parvl/train/stage_messages.h"

#include "parvl/nn/tensor_buffer.h"

namespace parvl {
namespace {

// In the group of an encoder rank and one of the LLM, which comes first.
constexpr int64_t kOfLlm = 0, kOfEncoder = 1;

void take(const at::Tensor& into, ProcessGroup* group, int64_t from) {
  if (into.numel() > 0) wait(group->receive(buffer_of(into), from));
}

}  // namespace

void StageMessages::post(const at::Tensor& tensor, ProcessGroup* group, int64_t to) {
  if (tensor.numel() == 0) return;
  Sent& last = sent_[group];
  if (last.work != nullptr) wait(last.work);
  last.tensor = tensor.contiguous();
  last.work = group->send(buffer_of(last.tensor), to);
}

void StageMessages::send(const at::Tensor& rows, int64_t to) {
  post(rows, ranks_.between_stages(ranks_.stage(), to), to > ranks_.stage() ? 1 : 0);
}

void StageMessages::receive(const at::Tensor& rows, int64_t from) {
  take(rows, ranks_.between_stages(from, ranks_.stage()), from > ranks_.stage() ? 1 : 0);
}

void StageMessages::send_visual(const at::Tensor& visual, int64_t replica) {
  for (const int64_t to : ranks_.first_stage(replica)) post(visual, ranks_.images(ranks_.rank(), to), kOfLlm);
}

at::Tensor StageMessages::receive_visual_grad(const at::Tensor& like, int64_t replica) {
  const at::Tensor sum = at::zeros_like(like), part = at::empty_like(like);
  for (const int64_t from : ranks_.first_stage(replica)) {  // in one order, so that a step has the same bits each time
    take(part, ranks_.images(from, ranks_.rank()), kOfLlm);
    sum.add_(part);
  }
  return sum;
}

void StageMessages::receive_visual(const at::Tensor& all, const RowSplit& rows, int64_t group) {
  for (const int64_t from : ranks_.encoder_ranks(group)) {
    const int64_t place = ranks_.encoder_place(from);
    take(all.narrow(0, rows.begin(place), rows.counts[static_cast<size_t>(place)]), ranks_.images(from, ranks_.rank()),
         kOfEncoder);
  }
}

void StageMessages::send_visual_grad(const at::Tensor& all, const RowSplit& rows, int64_t group) {
  for (const int64_t to : ranks_.encoder_ranks(group)) {
    const int64_t place = ranks_.encoder_place(to);
    post(all.narrow(0, rows.begin(place), rows.counts[static_cast<size_t>(place)]), ranks_.images(ranks_.rank(), to),
         kOfEncoder);
  }
}

void StageMessages::finish() {
  for (auto& [group, sent] : sent_) wait(sent.work);
  sent_.clear();
}

}  // namespace parvl
