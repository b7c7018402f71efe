// Image files named on a command line.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/media/prompt.h"

namespace parvl {

// Reads, decodes and processes each file; errors name it.
absl::StatusOr<std::vector<std::shared_ptr<const ProcessedImage>>> read_image_files(
    const std::vector<std::string>& paths, const PromptBuilder& prompts);

}  // namespace parvl
