// An instance's process: attaches to its gateway, takes on the modules that it is assigned, and computes what it is
// sent until it is released or the gateway is gone.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"
#include "parvl/exec/engine_load.h"

namespace parvl {

struct WorkerOptions {
  std::string gateway;  // HOST:PORT
  std::string token;    // the run's
  int64_t instance = 0, epoch = 0;
  // Called on another thread when the gateway is gone: then nothing that this process does counts any more, and it may
  // be in the middle of something long. For std::_Exit; null: run_worker returns once it hears of it.
  std::function<void(const absl::Status&)> on_gone;
};

// What loads the modules that it is assigned, from a model directory. Of a second assignment, beside an engine, the
// encoder on a thread of its own.
struct WorkerLoaders {
  std::function<absl::StatusOr<std::unique_ptr<Engine>>(const std::string& dir, const EngineOptions&)> engine;
  std::function<absl::StatusOr<std::unique_ptr<EncodeEngine>>(const std::string& dir, const EngineOptions&)> encoder;
};

// OK once it was released; Unavailable when the gateway is gone. The loader's error when the modules cannot be loaded,
// once the gateway, which was told, has ended the stream.
// `clock` must outlive it.
absl::Status run_worker(const WorkerOptions& options, const WorkerLoaders& loaders, const Clock& clock);

}  // namespace parvl
