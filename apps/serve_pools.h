// `parvl serve --config`: an allocation file → instances in processes of their own, behind one engine.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "apps/commands.h"
#include "apps/pools_view.h"
#include "parvl/exec/engine_load.h"
#include "parvl/plan/placement.h"
#include "parvl/serve/options.h"

namespace parvl {

class PixelStore;

struct PoolServing {
  Allocation allocation;
  PlacementPlan plan;
  std::map<std::string, std::string> device_map;
};

// Reads the file and holds it against the model; `dtype` as --dtype. InvalidArgument naming file, line and key.
absl::StatusOr<PoolServing> read_pools(const std::string& config, const std::string& device_map,
                                       const std::string& model_dir, const std::string& dtype);

// Unimplemented for what an instance cannot be yet.
absl::Status check_servable(const Allocation& allocation, const PlacementPlan& plan);

// Where images' patches lie for the instances: a quarter of the memory there is, and at least a GiB.
absl::StatusOr<std::shared_ptr<PixelStore>> start_pixels(const Context& context);

// What there is once, beside the allocation.
struct PoolsBase {
  std::string model_dir;
  EngineOptions engine;             // of each instance
  std::shared_ptr<PoolsView> view;  // shows them from the start
  std::shared_ptr<PixelStore> pixels;
};

// Starts every instance; returns when all are ready.
absl::StatusOr<std::unique_ptr<Engine>> start_pools(const PoolServing& pools, const PoolsBase& base,
                                                    const Context& context);

// What the allocation says of the gateway's queues.
void set_queues(const Allocation& allocation, ServeOptions& options);

}  // namespace parvl
