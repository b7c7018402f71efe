#include "parvl/models/weight_files.h"

#include <unistd.h>

#include <set>
#include <utility>
#include <vector>

#include "parvl/base/json.h"
#include "parvl/base/text.h"

namespace parvl {
namespace {

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

constexpr const char* kCanCarryCode[] = {"pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth",
                                         "model.pt"};

// File names of the index, each once.
absl::StatusOr<std::vector<std::string>> read_index(const std::string& index) {
  PARVL_ASSIGN_OR_RETURN(Json json, read_json_file(index));
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    return invalid(index, ": 'weight_map' is missing");
  }
  std::set<std::string> files;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string()) return invalid(index, ": the file of ", excerpt(tensor), " is not a string");
    const std::string name = file.get<std::string>();
    if (name.empty() || name[0] == '.' || name.find('/') != std::string::npos || name.find('\0') != std::string::npos) {
      return invalid(index, ": ", excerpt(name), " is not a plain file name");
    }
    files.insert(name);
  }
  if (files.empty()) return invalid(index, ": 'weight_map' is empty");
  return std::vector<std::string>(files.begin(), files.end());
}

// The names of a directory's weight files.
absl::StatusOr<std::vector<std::string>> file_names(const std::string& dir) {
  if (exists(dir + "/model.safetensors")) return std::vector<std::string>{"model.safetensors"};
  const std::string index = dir + "/model.safetensors.index.json";
  if (exists(index)) return read_index(index);
  for (const char* name : kCanCarryCode) {
    if (!exists(dir + "/" + name)) continue;
    return invalid(dir, " holds its weights in ", name,
                   ", a format that can carry code and is not loaded; convert it to safetensors");
  }
  return invalid(dir, " has neither model.safetensors nor model.safetensors.index.json");
}

}  // namespace

absl::StatusOr<std::map<std::string, StoredTensor>> open_weight_files(const std::string& dir) {
  PARVL_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_names(dir));
  std::map<std::string, StoredTensor> out;
  for (const std::string& name : names) {
    const std::string path = dir + "/" + name;
    PARVL_ASSIGN_OR_RETURN(auto file, MappedFile::open(path));
    PARVL_ASSIGN_OR_RETURN(auto entries, read_safetensors_header(file->bytes(), path));
    for (TensorEntry& entry : entries) {
      const std::string key = entry.name;
      auto [at, is_new] = out.try_emplace(key, StoredTensor{std::move(entry), name, file});
      if (!is_new) return invalid(path, ": tensor ", excerpt(key, 200), " also stands in ", at->second.file_name);
    }
  }
  return out;
}

}  // namespace parvl
