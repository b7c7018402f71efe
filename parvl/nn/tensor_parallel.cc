#include "parvl/nn/tensor_parallel.h"

#include <torch/csrc/autograd/custom_function.h>

#include "parvl/base/check.h"
#include "parvl/nn/tensor_buffer.h"

namespace parvl {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Backends move equal parts, so each rank's rows are filled up to the longest's.
at::Tensor gather(ProcessGroup& group, const at::Tensor& own, const RowSplit& rows) {
  const int64_t most = rows.most(), width = own.size(1);
  PARVL_CHECK(own.size(0) == rows.counts[static_cast<size_t>(group.rank())], "a rank gathers other rows than it has");
  at::Tensor filled = own.contiguous();
  if (own.size(0) < most) {
    filled = at::zeros({most, width}, own.options());
    filled.narrow(0, 0, own.size(0)).copy_(own);
  }
  const at::Tensor all = at::empty({most * group.size(), width}, own.options());
  if (all.numel() > 0) wait(group.all_gather(buffer_of(filled), buffer_of(all)));
  std::vector<at::Tensor> parts;
  bool together = true;  // only the tail is filled up
  int64_t begin = 0;
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    const int64_t count = rows.counts[static_cast<size_t>(rank)];
    together = together && (count == 0 || begin == rank * most);
    begin += count;
    if (count > 0) parts.push_back(all.narrow(0, rank * most, count));
  }
  if (together) return all.narrow(0, 0, begin);
  return at::cat(parts);
}

at::Tensor sum(ProcessGroup& group, const at::Tensor& part, const RowSplit& rows) {
  const int64_t most = rows.most(), width = part.size(1);
  PARVL_CHECK(part.size(0) == rows.total(), "ranks add up other rows than there are");
  at::Tensor filled = part.contiguous();
  if (most * group.size() != part.size(0)) {
    filled = at::zeros({most * group.size(), width}, part.options());
    int64_t begin = 0;
    for (int64_t rank = 0; rank < group.size(); ++rank) {
      const int64_t count = rows.counts[static_cast<size_t>(rank)];
      filled.narrow(0, rank * most, count).copy_(part.narrow(0, begin, count));
      begin += count;
    }
  }
  const at::Tensor own = at::empty({most, width}, part.options());
  if (filled.numel() > 0) wait(group.reduce_scatter(buffer_of(filled), buffer_of(own)));
  return own.narrow(0, 0, rows.counts[static_cast<size_t>(group.rank())]);
}

// Both ways are one function with forward and backward exchanged. The group and the split outlive the graph: the model
// owns the one, the context the other.
struct GatherRowsFn : Function<GatherRowsFn> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& own, int64_t group, std::vector<int64_t> counts) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["counts"] = counts;
    return gather(*reinterpret_cast<ProcessGroup*>(group), own, {counts});
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& group = *reinterpret_cast<ProcessGroup*>(ctx->saved_data["group"].toInt());
    return {sum(group, grads[0], {ctx->saved_data["counts"].toIntVector()}), {}, {}};
  }
};

struct SumRowsFn : Function<SumRowsFn> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& part, int64_t group, std::vector<int64_t> counts) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["counts"] = counts;
    return sum(*reinterpret_cast<ProcessGroup*>(group), part, {counts});
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& group = *reinterpret_cast<ProcessGroup*>(ctx->saved_data["group"].toInt());
    return {gather(group, grads[0], {ctx->saved_data["counts"].toIntVector()}), {}, {}};
  }
};

}  // namespace

at::Tensor TensorParallel::gather_rows(const at::Tensor& own_rH, const RowSplit& rows) const {
  if (alone() || rows.counts.empty()) return own_rH;
  return GatherRowsFn::apply(own_rH, reinterpret_cast<int64_t>(group_), rows.counts);
}

at::Tensor TensorParallel::sum_rows(const at::Tensor& part_RH, const RowSplit& rows) const {
  if (alone()) return part_RH;
  if (rows.counts.empty()) {
    const at::Tensor whole = part_RH.contiguous();
    PARVL_CHECK(!whole.requires_grad(), "rows that are whole on every rank have no backward");
    reduce(whole, ReduceOp::kSum);
    return whole;
  }
  return SumRowsFn::apply(part_RH, reinterpret_cast<int64_t>(group_), rows.counts);
}

at::Tensor TensorParallel::own_rows(const at::Tensor& all_RH, const RowSplit& rows) const {
  if (alone() || rows.counts.empty()) return all_RH;
  return all_RH.narrow(0, rows.begin(rank()), rows.counts[static_cast<size_t>(rank())]);
}

std::pair<at::Tensor, at::Tensor> TensorParallel::log_softmax(const at::Tensor& own_RV, const at::Tensor& targets_R1,
                                                              int64_t begin) const {
  const int64_t columns = own_RV.size(1);
  const at::Tensor largest = own_RV.amax({1}, /*keepdim=*/true);
  reduce(largest, ReduceOp::kMax);
  const at::Tensor shifted = own_RV - largest, at = targets_R1 - begin;
  const at::Tensor here = at::logical_and(at.ge(0), at.lt(columns));
  const at::Tensor of_target = shifted.gather(1, at.clamp(0, columns - 1)).mul_(here);
  const at::Tensor sums = at::stack({shifted.exp().sum(1, /*keepdim=*/true), of_target});  // over all columns
  reduce(sums, ReduceOp::kSum);
  const at::Tensor log_sum = sums[0].log();
  return {shifted - log_sum, sums[1] - log_sum};
}

void TensorParallel::reduce(const at::Tensor& values, ReduceOp op) const {
  if (!alone()) wait(group_->all_reduce(buffer_of(values), op));
}

}  // namespace parvl
