// How a model directory is loaded. Torch-free.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parvl/base/startup.h"

namespace parvl {

struct LoadOptions {
  std::string device = "auto";  // auto | cpu | cuda
  std::string dtype = "auto";   // auto (the directory's) | float32 | bfloat16 | float16 | float64
  int64_t max_model_len = 0;    // 0: the model's
  // What this process holds, by the names of an allocation (plan/allocation.h); empty: all that the model has. A
  // vision_encoder and its projector go together.
  std::vector<std::string> modules;
  // The share of the device's memory to use; by default 0.9 of a GPU's, and all that is free of the CPU's.
  std::optional<double> memory_utilization;
  int64_t memory_limit_bytes = 0;  // never more than this; 0: what the system says
  int64_t rank = 0;                // of this process among those that compute together on this machine, a GPU each
  // By rank, paths of SharedBlocks (base/shared_block.h) that all processes use which hold the same part of the same
  // model: the first loads, the others map what it loaded. On the CPU; empty: memory of its own.
  std::vector<std::string> shared_weights;
  std::string shared_block() const {
    const auto own = static_cast<size_t>(rank);
    return own < shared_weights.size() ? shared_weights[own] : "";
  }
  std::shared_ptr<Startup> startup;  // told of phases and progress; null: nobody is
};

}  // namespace parvl
