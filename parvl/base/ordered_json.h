// JSON whose objects keep the order of their keys: schemas and tools, where that order is what a model sees and writes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/json.h"

namespace parvl {

using OrderedJson = nlohmann::ordered_json;

// An ordered object searches its keys one by one, so a large one would take the square of its keys' number.
inline constexpr size_t kMaxOrderedKeys = 1024;

// As parse_json, with the same limits and kMaxOrderedKeys in each object that is kept. `keys`: of an object, read only
// these (all when empty).
absl::StatusOr<OrderedJson> parse_ordered_json(std::string_view text, const std::string& name,
                                               const std::vector<std::string>& keys = {},
                                               const JsonLimits& limits = {});

}  // namespace parvl
