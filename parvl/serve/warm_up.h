// A real encoding and a real decoding, so that the first request does not pay for what is made once, and what is broken
// shows before anybody waits for it.
#pragma once

#include <string>

#include "parvl/base/status.h"
#include "parvl/exec/encode_engine.h"
#include "parvl/exec/engine.h"

namespace parvl {

// Blocks until both are done. `encodes`: it holds the vision encoder, if the model has one.
absl::Status warm_up(Engine& engine, bool encodes = true);
// The encoding alone; `model_dir` says how large an image must be.
absl::Status warm_up(EncodeEngine& engine, const std::string& model_dir);

}  // namespace parvl
