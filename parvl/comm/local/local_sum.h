// Sums and maxima of arrays on the host, in the wide type and in a fixed order.
#pragma once

#include <vector>

#include "parvl/comm/process_group.h"

namespace parvl::local {

// Σ or max over the inputs' values [first, first + count), rounded once to their type. float16: a check fails.
class Reduced {
 public:
  Reduced(const std::vector<const void*>& inputs, int64_t first, int64_t count, DType dtype, ReduceOp op);
  void put(void* out) const;

 private:
  DType dtype_;
  std::vector<double> wide64_;  // of float64
  std::vector<float> wide32_;   // of the others
};

}  // namespace parvl::local
