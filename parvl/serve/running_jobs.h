// The generations of one request, which end with it however it ends. One thread.
#pragma once

#include <stop_token>
#include <utility>
#include <vector>

#include "parvl/exec/engine.h"

namespace parvl {

class RunningJobs {
 public:
  // `engine` must live until `engine_gone` is stopped; after that the destructor leaves it alone.
  RunningJobs(Engine& engine, std::stop_token engine_gone) : engine_(engine), engine_gone_(std::move(engine_gone)) {}
  ~RunningJobs() {
    if (!engine_gone_.stop_requested()) cancel();
  }
  RunningJobs(const RunningJobs&) = delete;
  RunningJobs& operator=(const RunningJobs&) = delete;

  size_t size() const { return ids_.size(); }
  void submit(EngineRequest request) {
    ids_.emplace_back();  // a place for it before it runs: nothing runs that is not known here
    ids_.back() = engine_.submit(std::move(request));
  }
  // No effect on those that have ended.
  void cancel() {
    for (const RequestId id : ids_) engine_.cancel(id);
    ids_.clear();
  }

 private:
  Engine& engine_;
  const std::stop_token engine_gone_;
  std::vector<RequestId> ids_;
};

}  // namespace parvl
