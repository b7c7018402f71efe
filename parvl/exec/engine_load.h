// A model directory → an engine on this process's device, or an encode engine. Torch-free.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parvl/base/clock.h"
#include "parvl/exec/encode_engine.h"
#include "parvl/exec/engine.h"
#include "parvl/exec/engine_trace.h"
#include "parvl/exec/load_options.h"

namespace parvl {

class Communicator;
class EngineRanks;  // exec/engine_ranks.h
class RingReader;

struct EngineOptions {
  LoadOptions load;
  int64_t max_seqs = 64;
  int64_t max_batched_tokens = 2048;
  double step_s = 0;                // see SchedulerConfig::step_s
  int64_t kv_cache_bytes = 0;       // 0: a quarter of what is left, at most 8 GiB; all that is left of a GPU's
  int64_t encoder_cache_bytes = 0;  // 0: an eighth of what is left, at most 1 GiB
  bool prefix_caching = true;
  bool enforce_eager = false;                   // on a GPU: no recorded decode steps
  std::string record_path;                      // "": nothing is recorded; else what `parvl replay` reads
  int64_t record_max_bytes = int64_t{1} << 30;  // where a record ends
  std::shared_ptr<Timeline> timeline;           // null: there is none
  EngineHooks hooks;
  // The LLM is cut into so many stages of layers, and each of these over so many ranks. With several ranks in all
  // `start_ranks` must be there, which starts the others once the directory and the memory are found to be in order.
  // The encoder is whole on each of them, and each encodes other images. On the CPU the ranks share its memory.
  int64_t tensor_ranks = 1, pipeline_stages = 1;
  int64_t ranks() const { return tensor_ranks * pipeline_stages; }
  // Called, on any thread, when another rank is asked to encode so many patches, and what it gives back when that is
  // over; empty: nobody watches.
  std::function<std::function<void()>(int64_t patches)> watch_image;
  int64_t micro_batch_tokens = 0;  // the fewest of what goes through a pipeline by itself; 0: by the device
  std::function<absl::StatusOr<std::unique_ptr<EngineRanks>>()> start_ranks;
};

// Errors as read_files; InvalidArgument too for limits that make no sense together, and, before any weight is read, for
// what does not fit the memory there is (plan/cost/fit.h). `clock` must outlive the engine. LoadOptions::modules must
// have the llm_backbone; without the vision_encoder every image of a request must bring its encoder output
// (EngineRequest::encoded).
absl::StatusOr<std::unique_ptr<Engine>> load_engine(const std::string& dir, const EngineOptions& options,
                                                    const Clock& clock);

// What every other rank of an engine does: loads its part of the model that the first one's first message names, and
// computes steps until the first one closes the ring; meanwhile it encodes images that the first one gives it.
// `communicator`: of all ranks, as this one. OK when the ring was
// closed; the error of a part that cannot be loaded or a step that failed: then this rank is of no use, and its process
// ends.
absl::Status run_engine_rank(Communicator& communicator, RingReader& steps, const Clock& clock);

// The vision encoder and the projector alone, which LoadOptions::modules may leave to be said. Of the limits,
// `max_seqs` is that of the images that are here at once; of the hooks, those of encodings and of turns are called.
// Errors likewise; InvalidArgument for a model that takes no images.
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
