// The executor of an engine: requests with their prompts, beside the steps of sched/executor.h. Torch-free.
#pragma once

#include <functional>

#include "parvl/base/status.h"
#include "parvl/exec/engine_request.h"
#include "parvl/sched/executor.h"

namespace parvl {

// An executor that computes with prompts: requests are made known to it before they appear in a step.
class ModelExecutor : public Executor {
 public:
  // InvalidArgument, and not known, when `generated` is not what the model or the request's grammar could have said.
  virtual absl::Status begin(RequestId id, const EngineRequest& request) = 0;
  // Forgets the request; a step in flight may still hold it.
  virtual void end(RequestId id) = 0;
  // Called from any thread whenever poll has something new. Set once, before the first submit.
  virtual void set_notify(std::function<void()> notify) = 0;
  // Any thread. Unavailable once it can compute nothing any more.
  virtual absl::Status health() const { return absl::OkStatus(); }
};

}  // namespace parvl
