// Safetensors headers: what is accepted lies inside the file and says its true size; it is written and read back the
// same.
#include "parvl/models/safetensors.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "tests/fuzz/fuzz.h"

namespace {

std::string file_of(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + header + std::string(data_bytes, 'x');
}

uint64_t element_bytes(const std::string& dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
  return 1;
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  return {
      file_of(R"({"a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}})", 24),
      file_of(R"({"__metadata__": {"format": "pt"}, "b": {"dtype": "BF16", "shape": [4], "data_offsets": [8, 16]}, )"
              R"("a": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}})",
              16),
      file_of(R"({"e": {"dtype": "F16", "shape": [0, 5], "data_offsets": [0, 0]}})", 0),
      file_of(
          R"({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}})",
          1),
      file_of("{}", 0),
  };
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  auto entries = parvl::read_safetensors_header(file, "model.safetensors");
  if (!entries.ok()) {
    require_good_message(std::string(entries.status().message()));
    return 0;
  }
  uint64_t total = 0;
  for (const parvl::TensorEntry& entry : *entries) {
    FUZZ_REQUIRE(entry.offset >= 8 && entry.offset <= size && entry.bytes <= size - entry.offset);
    uint64_t elements = 1;
    for (const int64_t side : entry.shape) {
      FUZZ_REQUIRE(side >= 0);
      elements *= static_cast<uint64_t>(side);
    }
    FUZZ_REQUIRE(elements * element_bytes(entry.dtype) == entry.bytes);
    total += entry.bytes;
  }
  FUZZ_REQUIRE(total <= size);  // nothing overlaps
  std::set<std::string> names;
  for (const parvl::TensorEntry& entry : *entries) FUZZ_REQUIRE(names.insert(entry.name).second);

  std::vector<parvl::TensorEntry> again = *entries;
  const std::string header = parvl::make_safetensors_header(again);
  const auto read = parvl::read_safetensors_header(header + std::string(total, 'x'), "written");
  FUZZ_REQUIRE(read.ok());
  FUZZ_REQUIRE(read->size() == entries->size());
  for (const parvl::TensorEntry& entry : *entries) {
    const auto same =
        std::find_if(read->begin(), read->end(), [&](const auto& other) { return other.name == entry.name; });
    FUZZ_REQUIRE(same != read->end());
    FUZZ_REQUIRE(same->dtype == entry.dtype && same->shape == entry.shape && same->bytes == entry.bytes);
  }
  return 0;
}
