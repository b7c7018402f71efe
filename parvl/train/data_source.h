// Where training samples come from: JSONL files and the easy-VQA package.
#pragma once

#include <istream>
#include <string>
#include <vector>

#include "parvl/train/data.h"

namespace parvl {

struct SourceLimits {
  size_t max_line_bytes = 4u << 20;
  size_t max_samples = 1u << 30;
  size_t max_images = 1024;  // a sample
};

// Reads conversations, one JSON object a line. `name` is what messages call the stream, `folder` what image paths are
// relative to. Blank lines are passed over.
absl::StatusOr<std::vector<RawSample>> read_jsonl(std::istream& stream, const std::string& name,
                                                  const std::string& folder, const SourceLimits& limits = {});

// The questions of one split (train, test, fit, holdout) of the package's data folder.
absl::StatusOr<std::vector<RawSample>> read_easy_vqa(const std::string& data_folder, const std::string& split);

// The package's data folder: .deps/data/easy_vqa/data of the nearest folder above `base_dir`, the running program, or
// the current folder.
absl::StatusOr<std::string> find_easy_vqa(const std::string& base_dir);

}  // namespace parvl
