#include "parvl/train/param_settings.h"

#include <algorithm>

namespace parvl {
namespace {

bool matches(const std::string& pattern, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return matches_pattern(pattern, name); });
}

}  // namespace

ParamSettings settings_of(const Recipe& recipe, const std::vector<std::string>& names, bool is_matrix) {
  ParamSettings out{true, recipe.optim.lr, recipe.optim.weight_decay};
  for (const OptimGroup& group : recipe.optim.groups) {
    if (!matches(group.match, names)) continue;
    if (group.lr >= 0) out.lr = group.lr;
    if (group.weight_decay >= 0) out.weight_decay = group.weight_decay;
    break;
  }
  if (!is_matrix) out.weight_decay = 0;
  const std::vector<std::string>& freeze = recipe.train.freeze;
  out.trains =
      std::none_of(freeze.begin(), freeze.end(), [&](const std::string& pattern) { return matches(pattern, names); });
  return out;
}

absl::Status check_patterns(const Recipe& recipe, const std::vector<std::string>& names) {
  const auto check = [&](const std::string& pattern, const char* key) -> absl::Status {
    if (matches(pattern, names)) return absl::OkStatus();
    return invalid(key, " pattern '", pattern, "' matches no parameter; names look like '", names.front(), "' and '",
                   names.back(), "' (parvl model inspect lists them)");
  };
  for (const std::string& pattern : recipe.train.freeze) PARVL_RETURN_IF_ERROR(check(pattern, "train.freeze"));
  for (const OptimGroup& group : recipe.optim.groups) PARVL_RETURN_IF_ERROR(check(group.match, "optim.groups"));
  return absl::OkStatus();
}

absl::Status nothing_trains() { return invalid("train.freeze leaves no parameter to train"); }

}  // namespace parvl
