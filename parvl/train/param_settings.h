// What a recipe's patterns say of a model's parameters. Pure.
#pragma once

#include <string>
#include <vector>

#include "parvl/train/recipe.h"

namespace parvl {

struct ParamSettings {
  bool trains = true;
  double lr = 0, weight_decay = 0;
};
// `names`: all that a parameter goes by, its own and those of parameters tied to it. The first group that matches
// decides.
ParamSettings settings_of(const Recipe& recipe, const std::vector<std::string>& names, bool is_matrix);

// InvalidArgument for a pattern of `freeze` or `groups` that matches none of all parameters' names, in their order.
absl::Status check_patterns(const Recipe& recipe, const std::vector<std::string>& names);
// InvalidArgument for a recipe that trains nothing.
absl::Status nothing_trains();

}  // namespace parvl
