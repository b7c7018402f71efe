// The safetensors format: an 8-byte little-endian length, a JSON header, raw tensor bytes. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/plan/model_spec.h"

namespace parvl {

struct TensorEntry {
  std::string name;
  std::string dtype;  // as the file spells it: F32, BF16, F16, F64
  std::vector<int64_t> shape;
  uint64_t offset = 0;  // of the first byte, from the start of the file
  uint64_t bytes = 0;
};

// Reads and checks the header of a whole file in memory (a mapping): lengths within the file, offsets in order without
// gaps or overlap, sizes that match shape and dtype, no name twice. `name` is the file's in messages.
absl::StatusOr<std::vector<TensorEntry>> read_safetensors_header(std::string_view file, const std::string& name);

// "F32" etc. for a dtype, and back (an integer or 8-bit type is an error that names it).
const char* safetensors_dtype(DType dtype);
absl::StatusOr<DType> parse_safetensors_dtype(const std::string& name);

// The header of a file that holds these tensors one after another (offsets are filled in), padded to 8 bytes.
std::string make_safetensors_header(std::vector<TensorEntry>& tensors);

}  // namespace parvl
