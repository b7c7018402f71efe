// The executor that computes on this process's device: one thread for steps, one for encoders.
#pragma once

#include <memory>

#include "parvl/exec/engine.h"
#include "parvl/exec/load.h"

namespace parvl {

// Takes the model; KV memory for the scheduler's blocks is set aside here (on the CPU the system gives it page by page
// as it is used). `graphs`: decode steps on a GPU are recorded and replayed where there are kernels for it; without it
// the same steps run launch by launch. `clock` must outlive it. Throws libtorch's exceptions when the device has too
// little.
std::unique_ptr<ModelExecutor> make_torch_executor(LoadedFiles files, const SchedulerConfig& config, const Clock& clock,
                                                   bool graphs = true);

}  // namespace parvl
