// The weight files of a Hugging Face directory, mapped, and what their headers say. Torch-free; reads no weight.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "parvl/base/file.h"
#include "parvl/models/safetensors.h"

namespace parvl {

// A tensor where it is stored.
struct StoredTensor {
  TensorEntry entry;
  std::string file_name;  // inside the directory
  std::shared_ptr<MappedFile> file;
};

// All tensors of DIR/model.safetensors, or of the files that DIR/model.safetensors.index.json names, by their names.
// Refused: a directory whose only weights can carry code (pytorch_model.bin, *.pt; by name), an index that names a file
// outside the directory, a damaged file, a name in two files.
absl::StatusOr<std::map<std::string, StoredTensor>> open_weight_files(const std::string& dir);

}  // namespace parvl
