// What the stages of a pipeline send each other, over the groups that RunRanks has for it.
#pragma once

#include <map>
#include <memory>

#include "parvl/nn/row_split.h"
#include "parvl/train/run_ranks.h"

namespace parvl {

// Of one rank, on its thread. A message is posted when the one before it in its channel has arrived, so that a rank
// which waits for nobody does not fill the memory with what it sends. One without rows is not sent, since its receiver
// knows. Errors of the groups are thrown.
class StageMessages {
 public:
  explicit StageMessages(const RunRanks& ranks) : ranks_(ranks) {}  // borrowed

  // Rows of this rank's to, or into `rows` from, the same rank of a neighbouring stage.
  void send(const at::Tensor& rows, int64_t to);
  void receive(const at::Tensor& rows, int64_t from);

  // With the vision encoder on ranks of its own, of these: "visual" of the images encoded here to every rank of a
  // replica's first stage; and the gradient, the sum of theirs.
  void send_visual(const at::Tensor& visual, int64_t replica);
  at::Tensor receive_visual_grad(const at::Tensor& like, int64_t replica);
  // Of a first stage: the rows of one group's ranks into their place in those of all encoder ranks, which `rows`
  // counts; and their part of the gradient back.
  void receive_visual(const at::Tensor& all, const RowSplit& rows, int64_t group);
  void send_visual_grad(const at::Tensor& all, const RowSplit& rows, int64_t group);

  // Until all that was sent has arrived.
  void finish();

 private:
  struct Sent {
    at::Tensor tensor;
    std::unique_ptr<Work> work;
  };
  void post(const at::Tensor& tensor, ProcessGroup* group, int64_t to);

  const RunRanks& ranks_;
  std::map<ProcessGroup*, Sent> sent_;
};

}  // namespace parvl
