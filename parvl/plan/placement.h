// An allocation held against a model: which instances there are, what each holds, and how it is cut. Pure.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "parvl/base/parallel_spec.h"
#include "parvl/plan/allocation.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

struct PlacedModule {
  ModuleName module = ModuleName::kBackbone;
  ModuleLayout layout;  // over the instance's devices; product() is their number
};

// All instances of a pool are alike.
struct PoolPlan {
  std::string name;
  std::string device;  // class
  PoolRole role = PoolRole::kLlm;
  int64_t min_instances = 1, instances = 1, max_instances = 1;
  int64_t devices_an_instance = 1;
  int64_t devices = 1;  // of the pool
  std::vector<PlacedModule> modules;
  int64_t weight_bytes = 0;          // on the device of an instance that holds the most
  std::vector<std::string> reasons;  // what the file left open and why it became this, a sentence each
};

struct PlacementPlan {
  std::vector<PoolPlan> pools;  // in the file's order
};

// InvalidArgument naming file, line and key, and what would be valid: a module that the model lacks, roles that do not
// fit together, a size that does not divide the model, more devices than the pool or more weights than a device has.
absl::StatusOr<PlacementPlan> place(const Allocation& allocation, const ModelSpec& spec, DType dtype);

// "gpu-24gb=cpu,gpu-40gb=cpu" → what to compute on instead of devices of a class. InvalidArgument for a class that the
// allocation does not name, and for anything but cpu and cuda.
absl::StatusOr<std::map<std::string, std::string>> parse_device_map(const std::string& text,
                                                                    const Allocation& allocation);

}  // namespace parvl
