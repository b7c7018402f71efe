// Samples to verify or measure a model with where there are none: images of many sizes, texts of many lengths.
#pragma once

#include <cstdint>
#include <string>

#include "parvl/base/status.h"

namespace parvl {

// Writes FOLDER/data.jsonl and its images, the same for the same arguments: some samples without an image, some without
// an answer, some with two turns. `images`: whether the model takes any. The folder must exist.
absl::Status write_made_up_data(const std::string& folder, int64_t samples, bool images);

}  // namespace parvl
