// JSON whose objects keep the order of their keys: schemas and tools, where that order is what a model sees and writes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/json.h"

namespace parvl {

using OrderedJson = nlohmann::ordered_json;

// As parse_json, with the same limits. `keys`: of an object, read only these (all when empty).
absl::StatusOr<OrderedJson> parse_ordered_json(std::string_view text, const std::string& name,
                                               const std::vector<std::string>& keys = {},
                                               const JsonLimits& limits = {});

}  // namespace parvl
