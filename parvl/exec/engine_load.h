// A model directory → an engine on this process's device, or an encode engine. Torch-free.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parvl/base/clock.h"
#include "parvl/exec/encode_engine.h"
#include "parvl/exec/engine.h"
#include "parvl/exec/load_options.h"

namespace parvl {

struct EngineOptions {
  LoadOptions load;
  int64_t max_seqs = 64;
  int64_t max_batched_tokens = 2048;
  int64_t kv_cache_bytes = 0;       // 0: a quarter of what is left, at most 8 GiB; all that is left of a GPU's
  int64_t encoder_cache_bytes = 0;  // 0: an eighth of what is left, at most 1 GiB
  bool prefix_caching = true;
  bool enforce_eager = false;                   // on a GPU: no recorded decode steps
  std::string record_path;                      // "": nothing is recorded; else what `parvl replay` reads
  int64_t record_max_bytes = int64_t{1} << 30;  // where a record ends
  std::shared_ptr<Timeline> timeline;           // null: there is none
  EngineHooks hooks;
};

// Errors as read_files; InvalidArgument too for limits that make no sense together, and, before any weight is read, for
// what does not fit the memory there is (plan/cost/fit.h). `clock` must outlive the engine. LoadOptions::modules must
// have the llm_backbone; without the vision_encoder every image of a request must bring its encoder output
// (EngineRequest::encoded).
absl::StatusOr<std::unique_ptr<Engine>> load_engine(const std::string& dir, const EngineOptions& options,
                                                    const Clock& clock);

// The vision encoder and the projector alone, which LoadOptions::modules may leave to be said. Of the limits,
// `max_seqs` is that of the images that are here at once; of the hooks, a batch of images is a step, and its patches
// are the step's tokens. Errors likewise; InvalidArgument for a model that takes no images.
absl::StatusOr<std::unique_ptr<EncodeEngine>> load_encode_engine(const std::string& dir, const EngineOptions& options,
                                                                 const Clock& clock);

// What can be said and checked about a model's requests without its weights.
struct EngineFront {
  std::shared_ptr<const PromptBuilder> prompts;
  SamplingParams sampling;  // as Engine::default_sampling()
  std::vector<TokenId> end_tokens;
  int64_t max_model_len = 0;
};
// Errors as read_files.
absl::StatusOr<EngineFront> load_front(const std::string& dir, const LoadOptions& options);

}  // namespace parvl
