// Which values of a tensor somebody holds: what tensor parallelism cuts, and of that what ZeRO cuts. Pure.
#pragma once

#include <cstdint>
#include <functional>

#include "parvl/base/json.h"

namespace parvl {

// In a tensor's row-major order, the same range of every `period` values; and of all these, in order, from `begin` to
// `end`. (A cut of dim d in b blocks has the period shape[d] / b · shape[d + 1] · …; a whole tensor is one period.)
struct TensorSlice {
  int64_t period = 1, offset = 0, length = 1;
  int64_t begin = 0, end = 0;

  int64_t size() const { return end - begin; }
};

// Calls `copy` for each run of values that both slices of one tensor hold, in the tensor's order: where the run begins
// in each of them, and its length. Returns how many values these are.
using CopyRun = std::function<void(int64_t in_a, int64_t in_b, int64_t count)>;
int64_t for_common_runs(const TensorSlice& a, const TensorSlice& b, const CopyRun& copy);

Json to_json(const TensorSlice& slice);
// InvalidArgument when it is no slice of a tensor of `numel` values.
absl::StatusOr<TensorSlice> slice_from_json(const Json& json, int64_t numel);

}  // namespace parvl
