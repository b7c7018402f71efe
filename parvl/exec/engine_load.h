// A model directory → an engine on this process's device. Torch-free.
#pragma once

#include <memory>
#include <string>

#include "parvl/base/clock.h"
#include "parvl/exec/engine.h"
#include "parvl/exec/load_options.h"

namespace parvl {

struct EngineOptions {
  LoadOptions load;
  int64_t max_seqs = 64;
  int64_t max_batched_tokens = 2048;
  int64_t kv_cache_bytes = 0;  // 0: a quarter of the free memory, at most 8 GiB; never more than is of use
  int64_t encoder_cache_bytes = int64_t{1} << 30;
  bool prefix_caching = true;
  std::string record_path;             // "": nothing is recorded; else what `parvl replay` reads
  std::shared_ptr<Timeline> timeline;  // null: there is none
};

// Errors as load_files; InvalidArgument too for limits that make no sense together. `clock` must outlive the engine.
absl::StatusOr<std::unique_ptr<Engine>> load_engine(const std::string& dir, const EngineOptions& options,
                                                    const Clock& clock);

}  // namespace parvl
