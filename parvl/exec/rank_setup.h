// What the first rank of an engine tells the others before any step.
#pragma once

#include <string>

#include "parvl/exec/engine_load.h"

namespace parvl {

struct RankSetup {
  std::string dir;         // of the model
  EngineOptions options;   // of what is loaded, and of a step's size
  int64_t num_blocks = 0;  // of KV memory
  bool encodes = false;    // each rank holds the encoder too
};

std::string to_message(const RankSetup& setup);
absl::StatusOr<RankSetup> read_setup(const std::string& message);

}  // namespace parvl
