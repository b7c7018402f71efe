// Tensor parallelism: the matrices of a module are cut over the ranks of a group, and so are the rows between them
// (norms, residuals; Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022,
// section 4.2.2). Before a matrix that is cut by its outputs all rows are gathered; after one that is cut by its inputs
// each rank gets the sum of its own rows. A parameter that is whole on every rank therefore meets some of the rows
// only: its gradient is a part of the sum, as is that of a vector which adds to or scales these rows.
//
// A forward of a few rows, one token of each sequence, is quicker with all rows on every rank (Shoeybi et al.,
// "Megatron-LM", 2019): after a matrix that is cut by its inputs every rank gets the whole sum, which is one short call
// in place of two. That is what an empty RowSplit says. No autograd then.
//
// Shapes: R rows of all ranks, r rows of this one, H features.
#pragma once

#include <ATen/ATen.h>

#include <utility>

#include "parvl/comm/process_group.h"
#include "parvl/nn/row_split.h"

namespace parvl {

// The ranks that a module is cut over, as its layers see them. One thread; all ranks of the group make the same calls.
// Alone, every call gives its input back. Errors of the group are thrown (see nn/tensor_buffer.h).
class TensorParallel {
 public:
  TensorParallel() = default;
  explicit TensorParallel(ProcessGroup* group) : group_(group) {}  // null: alone. Borrowed

  bool alone() const { return group_ == nullptr; }
  int64_t size() const { return alone() ? 1 : group_->size(); }
  int64_t rank() const { return alone() ? 0 : group_->rank(); }
  ProcessGroup* group() const { return group_; }
  RowSplit split(int64_t rows, int64_t unit = 1) const {
    return alone() || whole_rows_ ? RowSplit{} : even_rows(rows, size(), unit);
  }
  // Whether every rank has all rows of the forwards to come. All ranks say the same.
  bool whole_rows() const { return whole_rows_; }
  void keep_whole_rows(bool whole) { whole_rows_ = whole; }

  // [r, H] of each rank → [R, H]. Differentiable: each rank's rows get the sum of all ranks' gradients of them.
  at::Tensor gather_rows(const at::Tensor& own_rH, const RowSplit& rows) const;
  // The sum over ranks of [R, H], of which each gets its own rows [r, H]. Differentiable.
  at::Tensor sum_rows(const at::Tensor& part_RH, const RowSplit& rows) const;
  // This rank's rows of what every rank has.
  at::Tensor own_rows(const at::Tensor& all_RH, const RowSplit& rows) const;
  // The logarithm of softmax over columns that are cut: this rank has [R, V_r] of them, from column `begin` on. Gives
  // that of its own columns, and [R, 1] of each row's target (int64 [R, 1], a column of any rank). No autograd; not
  // alone.
  std::pair<at::Tensor, at::Tensor> log_softmax(const at::Tensor& own_RV, const at::Tensor& targets_R1,
                                                int64_t begin) const;
  // Sum or maximum over the ranks, in place. No autograd.
  void reduce(const at::Tensor& values, ReduceOp op) const;

 private:
  ProcessGroup* group_ = nullptr;
  bool whole_rows_ = false;
};

}  // namespace parvl
