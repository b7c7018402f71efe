// Sums of gradients over data-parallel ranks, a part of a flat tensor at a time. On GPUs a part's sum begins as soon as
// the backward has nothing more to add to it, and runs beside the rest of the backward (Li et al., "PyTorch
// Distributed", VLDB 2020, section 3.2.3). The calls are the same ones in the same order on every rank, whatever its
// backward: from the last parameter to the first.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parvl/comm/process_group.h"
#include "parvl/nn/param.h"

namespace parvl {

struct OptimGroupState;

// One thread.
class GradientSums {
 public:
  // `groups` and their gradients stay where they are; a group without data ranks has nothing to sum.
  GradientSums(const std::vector<OptimGroupState>& groups, at::Device device);

  // This step's backward has added all it will to the parameters whose names start with `prefix`. May be left out.
  void is_final(const std::string& prefix);
  // Makes the sums that have not begun, and waits for all, on a GPU in the order of the current stream. Throws the
  // group's error. The next step starts over.
  void finish();

 private:
  struct Part {
    const OptimGroupState* group = nullptr;
    int64_t begin = 0, count = 0;     // of the flat tensor
    std::vector<std::string> adding;  // parameters with values there that are not final
  };
  void start_over();
  void begin_next();

  const std::vector<OptimGroupState>& groups_;
  const at::Device device_;
  bool early_ = false;       // whether sums may begin before `finish`
  std::vector<Part> parts_;  // in the order of the calls
  size_t next_ = 0;
  std::vector<std::unique_ptr<Work>> works_;
  std::optional<c10::Stream> stream_;
};

}  // namespace parvl
