// NVIDIA's driver, as far as it is asked without PyTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parvl/base/status.h"

namespace parvl {

inline constexpr char kUseCpu[] = "use --device cpu (with an allocation: --device-map CLASS=cpu)";

// libcuda, loaded for good; FailedPrecondition where there is none.
absl::StatusOr<void*> load_gpu_driver();

// How many GPUs it shows this process (CUDA_VISIBLE_DEVICES); FailedPrecondition when there is none. No GPU is used.
absl::StatusOr<int64_t> count_gpus();

absl::Status no_gpu_shown();

// The names of the first `count` GPUs that this process sees: those that CUDA_VISIBLE_DEVICES lists, which may be
// fewer, else numbers.
std::vector<std::string> gpu_names(int64_t count);

// The machine's number of the GPU that this process sees as `index`: CUDA_VISIBLE_DEVICES may show it others. Where
// that has names of another kind, `index`.
int64_t gpu_number(int64_t index);

}  // namespace parvl
