// The ranks of a training run: who this process is among them, and what all must agree on.
#pragma once

#include <absl/types/span.h>

#include <memory>

#include "parvl/base/parallel_spec.h"
#include "parvl/comm/device_mesh.h"
#include "parvl/nn/param.h"
#include "parvl/train/data.h"
#include "parvl/train/vision_share.h"

namespace parvl {

// One thread. Alone, everything is immediate.
class RunRanks {
 public:
  // Connects to the others; all ranks call it. `communicator` null: one process. It outlives this.
  static absl::StatusOr<std::unique_ptr<RunRanks>> create(const ParallelSpec& spec, bool has_vision,
                                                          Communicator* communicator);

  int64_t rank() const { return mesh_ == nullptr ? 0 : mesh_->rank(); }
  int64_t world() const { return mesh_ == nullptr ? 1 : mesh_->plan().world; }
  bool is_first() const { return rank() == 0; }  // writes what the run writes
  BatchShare share(int64_t micro_batch) const;
  // The ranks that hold a module's parameters and train on other samples; null when there are none.
  ProcessGroup* data(Module module) const;
  // The ranks that a module's matrices are cut over; null when they are not.
  ProcessGroup* tensor(Module module) const;
  // The ranks that train on the same samples as this one; null when there is none.
  ProcessGroup* replica() const;
  // One rank of each replica: what its ranks have alike is counted there.
  bool counts() const { return replica() == nullptr || replica()->rank() == 0; }
  // Whether this rank is the first of those that hold the same part of a parameter.
  bool holds_first(const Param& param) const;
  // How this replica's images are dealt out over its ranks. The model must have a vision encoder.
  VisionLayout vision_layout() const;

  // Sums over all ranks, in place. All ranks call it, as they do the rest.
  absl::Status sum(absl::Span<double> values) const;
  // This rank's status when that is an error; else the news that another rank has failed, and which; else OK. So that
  // nobody goes on, or waits, alone.
  absl::Status agree(const absl::Status& mine) const;

  // The sum of whole numbers over all ranks, modulo 2^64, exact. At most 2^20 ranks.
  absl::Status sum_exactly(absl::Span<uint64_t> values) const;

  // OK when these texts are equal on all ranks; else InvalidArgument naming the first that is not.
  absl::Status expect_equal(const std::vector<std::pair<std::string, std::string>>& named) const;
  // Ends the others' calls, as far as the backend can.
  void abort(const std::string& reason) const;

 private:
  std::unique_ptr<DeviceMesh> mesh_;  // null: one process
};

}  // namespace parvl
