// The executor that computes on this process's device: one thread for steps, one for encoders.
#pragma once

#include <functional>
#include <memory>

#include "parvl/base/clock.h"
#include "parvl/exec/engine_ranks.h"
#include "parvl/exec/engine_trace.h"
#include "parvl/exec/load.h"
#include "parvl/exec/model_executor.h"
#include "parvl/sched/scheduler.h"

namespace parvl {

struct ExecutorOptions {
  // On a GPU decode steps and encodings of a few images are recorded and replayed where there are kernels for it;
  // without it the same work runs launch by launch.
  bool graphs = true;
  std::shared_ptr<Startup> startup;  // told of the recording; may be null
  // The other ranks of a model whose backbone is cut (LoadedFiles::ranks); null: it is whole. Nothing of such a
  // backbone is recorded.
  std::unique_ptr<EngineRanks> ranks;
  int64_t micro_batch_tokens = 0;                                     // see EngineOptions
  std::function<std::function<void()>(int64_t patches)> watch_image;  // likewise
  EngineHooks hooks;                                                  // those of encodings; the others are the engine's
};

// Takes the model; KV memory for the scheduler's blocks is set aside here (on the CPU the system gives it page by page
// as it is used). `clock` must outlive it. Throws libtorch's exceptions when the device has too little.
std::unique_ptr<ModelExecutor> make_torch_executor(LoadedFiles files, const SchedulerConfig& config, const Clock& clock,
                                                   ExecutorOptions options = {});

}  // namespace parvl
