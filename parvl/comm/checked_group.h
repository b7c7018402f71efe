// Groups whose calls are compared among the ranks, for every backend: a rank that calls something else, or does not
// come, is named with its call, shapes and place in the code.
#pragma once

#include <memory>

#include "parvl/comm/call_watch.h"
#include "parvl/comm/communicator.h"

namespace parvl {

// A rank's groups, each over a group of another communicator. A call that was right costs a hash and a line in the log.
// When a call takes longer than patience_s, or fails, the ranks tell each other where they are, and end with
//   InvalidArgument: they made different calls, or wait for each other in a circle;
//   DeadlineExceeded: a rank does not come within deadline_s, or its process has been silent for silent_s;
//   Aborted: a group was aborted, here or on another rank. All groups of all ranks end together.
// Calls and joins come from one thread; abort from any. All ranks make theirs in the same order.
class CheckedCommunicator : public Communicator {
 public:
  // `inner` outlives this, and this its groups.
  CheckedCommunicator(Communicator& inner, const CheckOptions& options);

  int64_t rank() const override { return inner_.rank(); }
  int64_t world() const override { return inner_.world(); }
  absl::StatusOr<std::unique_ptr<ProcessGroup>> join(const GroupSpec& group) override;
  std::unique_ptr<Store> make_store() override { return inner_.make_store(); }

  // OK when all ranks have made the same calls in all their groups so far; else InvalidArgument naming the first that
  // differs. All ranks call it while no message is under way; `world`: a group of all ranks, one of this
  // communicator's, in host memory. One all_gather of 8 bytes.
  absl::Status compare(ProcessGroup& world);

 private:
  Communicator& inner_;
  const CheckOptions options_;
  std::unique_ptr<Store> store_;  // for the thread that makes the calls
  CallWatch watch_;
  int64_t compared_ = 0;
};

}  // namespace parvl
