// The encode engine that computes on this process's device, on one thread.
#pragma once

#include <memory>

#include "parvl/exec/encode_engine.h"
#include "parvl/exec/engine_trace.h"
#include "parvl/exec/load.h"

namespace parvl {

struct EncodeEngineConfig {
  int64_t max_images = 64;
  int64_t max_patches = 0;  // of one image; the memory set aside for encoding holds no more
  bool graphs = true;  // on a GPU encodings of a few images are recorded and replayed where there are kernels for it
  std::shared_ptr<Startup> startup;  // told of the recording; may be null
  EngineHooks hooks;                 // of encodings, and turns
};

// Takes the model, whose encoder has its weights. `clock` must outlive it. Throws libtorch's exceptions when the device
// has too little memory.
std::unique_ptr<EncodeEngine> make_torch_encode_engine(LoadedFiles files, const EncodeEngineConfig& config,
                                                       const Clock& clock);

}  // namespace parvl
