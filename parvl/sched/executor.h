// The seam between deciding and computing.
#pragma once

#include <optional>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/sched/output.h"
#include "parvl/sched/sampling.h"

namespace parvl {

// The token chosen after one sequence, or why none could be.
struct SampledToken {
  TokenId id = 0;
  TokenLogprob logprob;  // when asked for
  bool last = false;     // what the sequence must look like is complete: nothing may follow
  absl::Status status;
};

// What an executor reports: a step with its tokens, one encoding, or keys and values that came or did not.
struct Completion {
  enum class Kind { kStep, kEncode, kKvFetch };
  Kind kind = Kind::kStep;
  absl::Status status;               // why all of it failed; then there are no tokens
  StepId step;                       // kStep
  std::vector<SampledToken> tokens;  // kStep: of the sequences that sample, in the step's order
  SlotId slot;                       // kEncode
  RequestId request;                 // kKvFetch
  double start_s = 0, end_s = 0;     // when it was computed, by the clock
  bool replayed = false;             // by one launch of work that was recorded before
  bool fetched = false;              // kEncode: from elsewhere, where it was encoded
};

// Turns a SchedulerOutput into tokens. The real one drives a model, the simulator's asks a cost model. Requests are
// made known to it by their own call, which belongs to the implementation. One caller.
class Executor {
 public:
  virtual ~Executor() = default;
  // Forgets evicted slots, starts the encodings and fetches and then, when it has sequences, the step. Does not wait.
  virtual void submit(const SchedulerOutput& output) = 0;
  // The next completion in the order in which they happened; nullopt when there is none yet.
  virtual std::optional<Completion> poll() = 0;
};

}  // namespace parvl
