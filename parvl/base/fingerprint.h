// Whether a model's directory is the one that it was.
#pragma once

#include <string>

#include "parvl/base/status.h"

namespace parvl {

// Equal as long as no file of the directory that a model is loaded from (weights, configuration, tokenizer, template)
// is written, replaced, added or taken away: of names, sizes, times of change and inodes, so it costs no reading.
// Links count as what they lead to. NotFound when there is no such directory.
absl::StatusOr<std::string> fingerprint_model(const std::string& dir);

}  // namespace parvl
