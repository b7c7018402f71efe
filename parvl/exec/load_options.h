// How a model directory is loaded. Torch-free.
#pragma once

#include <cstdint>
#include <string>

namespace parvl {

struct LoadOptions {
  std::string device = "auto";  // auto | cpu | cuda
  std::string dtype = "auto";   // auto (the directory's) | float32 | bfloat16 | float16 | float64
  int64_t max_model_len = 0;    // 0: the model's
};

}  // namespace parvl
