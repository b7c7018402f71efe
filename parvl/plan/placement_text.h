// A placement as people and programs read it.
#pragma once

#include <map>
#include <string>

#include "parvl/base/json.h"
#include "parvl/plan/placement.h"

namespace parvl {

// The allocation with every default filled in, and what became of it for the model. `device_map` as of
// parse_device_map(). Tokens are secrets: only who has one is told.
Json placement_json(const Allocation& allocation, const PlacementPlan& plan,
                    const std::map<std::string, std::string>& device_map);

}  // namespace parvl
