// The seam between deciding and computing.
#pragma once

#include <optional>

#include "parvl/base/status.h"
#include "parvl/sched/output.h"

namespace parvl {

// What an executor reports: a step with its tokens, or one encoding.
struct Completion {
  enum class Kind { kStep, kEncode };
  Kind kind = Kind::kStep;
  absl::Status status;  // why it failed; then `tokens.tokens` is empty
  StepTokens tokens;    // kStep
  SlotId slot;          // kEncode
};

// Turns a SchedulerOutput into tokens. The real one drives a model, the simulator's asks a cost model. Requests are
// made known to it by their own call, which belongs to the implementation. One caller.
class Executor {
 public:
  virtual ~Executor() = default;
  // Forgets evicted slots, starts the encodings and then, when it has sequences, the step. Does not wait.
  virtual void submit(const SchedulerOutput& output) = 0;
  // The next completion in the order in which they happened. `wait`: until there is one; nothing may be awaited when
  // nothing was submitted. Otherwise nullopt when there is none yet.
  virtual std::optional<Completion> poll(bool wait) = 0;
};

}  // namespace parvl
