// Where groups come from: one object a rank, which joins the same groups in the same order as all others.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parvl/comm/mesh_plan.h"
#include "parvl/comm/process_group.h"
#include "parvl/comm/run_store.h"

namespace parvl {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int64_t rank() const = 0;  // in the world
  virtual int64_t world() const = 0;
  // This rank's end of a group that it is a member of, connected to all others: waits for them. An error names the
  // group.
  virtual absl::StatusOr<std::unique_ptr<ProcessGroup>> join(const GroupSpec& group) = 0;
  // The n-th store that a rank makes is one with the n-th of all others, and apart from all else. A connection of its
  // own; may outlive this.
  virtual std::unique_ptr<Store> make_store() = 0;
};

}  // namespace parvl
