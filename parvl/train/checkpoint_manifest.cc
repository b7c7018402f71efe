#include "parvl/train/checkpoint_manifest.h"

#include <absl/strings/match.h>

#include <algorithm>
#include <filesystem>

namespace parvl {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kFormat = 2;

std::vector<std::string> files_below(const std::string& dir) {
  std::vector<std::string> out;
  for (const auto& entry : fs::recursive_directory_iterator(dir)) {
    if (entry.is_regular_file()) out.push_back(fs::relative(entry.path(), dir).string());
  }
  std::sort(out.begin(), out.end());
  return out;
}

bool is_hash(const Json& value) { return value.is_string() && value.get_ref<const std::string&>().size() == 64; }

}  // namespace

absl::Status write_manifest(const std::string& dir, const std::map<std::string, TensorFileHashes>& weights) {
  Json content = {{"format", kFormat}, {"files", Json::object()}, {"weights", Json::object()}};
  for (const auto& [file, hashes] : weights) content["weights"][file] = to_json(hashes);
  for (const std::string& file : files_below(dir)) {
    const bool part_of_state = absl::StartsWith(file, "trainer/") && absl::EndsWith(file, ".safetensors");
    if (weights.count(file) > 0 || part_of_state) continue;
    PARVL_ASSIGN_OR_RETURN(content["files"][file], sha256_file(dir + "/" + file));
  }
  // Its own hash, so that damage to the list is not taken for damage to a file of the list.
  const Json manifest = {{"content", content}, {"sha256", sha256_hex(content.dump())}};
  return write_file_atomically(dir + "/" + kManifestFile, manifest.dump(1) + "\n");
}

absl::StatusOr<CheckpointManifest> read_manifest(const std::string& dir) {
  const absl::StatusOr<Json> manifest = read_json_file(dir + "/" + kManifestFile);
  if (absl::IsNotFound(manifest.status())) return invalid(dir, " is no whole checkpoint: it lacks ", kManifestFile);
  if (!manifest.ok()) return with_context(manifest.status(), absl::StrCat("checkpoint ", dir, " is damaged"));
  const absl::Status damaged = invalid("checkpoint ", dir, " is damaged: ", kManifestFile, " is not as it was written");
  if (!manifest->is_object() || !manifest->contains("sha256")) return damaged;
  const Json& hash = (*manifest)["sha256"];
  if (manifest->contains("files") && hash == sha256_hex((*manifest)["files"].dump())) {
    return invalid("checkpoint ", dir,
                   " was written by an earlier version of this program, whose optimizer state this one cannot read; "
                   "end that run with that version, or start a new one from its weights (model: ",
                   dir, ")");
  }
  if (!manifest->contains("content")) return damaged;
  const Json& content = (*manifest)["content"];
  if (!content.is_object() || hash != sha256_hex(content.dump())) return damaged;
  PARVL_ASSIGN_OR_RETURN(const int64_t format, json_value<int64_t>(content, "format", 0));
  if (format != kFormat)
    return invalid(dir, "/", kManifestFile, " has the format ", format, "; this program reads format ", kFormat);
  const Json files = content.value("files", Json()), weights = content.value("weights", Json());
  if (!files.is_object() || !weights.is_object() || !files.contains("config.json")) return damaged;
  CheckpointManifest out;
  for (const auto& [file, value] : files.items()) {
    if (!is_hash(value)) return damaged;
    out.files[file] = value.get<std::string>();
  }
  for (const auto& [file, value] : weights.items()) {
    PARVL_ASSIGN_OR_RETURN(out.weights[file], hashes_from_json(value));
  }
  for (const Json& named : {files, weights}) {
    for (const auto& [file, value] : named.items()) {
      if (absl::StrContains(file, "..") || absl::StartsWith(file, "/"))
        return invalid(dir, "/", kManifestFile, " names a file outside the checkpoint");
    }
  }
  return out;
}

absl::StatusOr<std::string> read_checked(const std::string& dir, const CheckpointManifest& manifest,
                                         const std::string& file) {
  const auto found = manifest.files.find(file);
  if (found == manifest.files.end()) return invalid(kManifestFile, " does not name ", file);
  absl::StatusOr<std::string> text = read_file(dir + "/" + file);
  if (absl::IsNotFound(text.status())) return invalid(file, " is missing");
  PARVL_RETURN_IF_ERROR(text.status());
  if (sha256_hex(*text) != found->second) return invalid(file, " does not have the hash it was written with");
  return text;
}

Json to_json(const TensorFileHashes& hashes) {
  Json tensors = Json::array();
  for (const auto& [name, hash] : hashes.tensors) tensors.push_back({{"name", name}, {"sha256", hash}});
  return {{"bytes", hashes.bytes}, {"header", hashes.header}, {"tensors", tensors}};
}

absl::StatusOr<TensorFileHashes> hashes_from_json(const Json& json) {
  const absl::Status malformed = invalid("the hashes of a tensor file are malformed");
  const bool whole = json.is_object() && json.contains("bytes") && json["bytes"].is_number_unsigned() &&
                     json.contains("header") && is_hash(json["header"]) && json.contains("tensors") &&
                     json["tensors"].is_array();
  if (!whole) return malformed;
  TensorFileHashes out{json["bytes"].get<uint64_t>(), json["header"].get<std::string>(), {}};
  for (const Json& tensor : json["tensors"]) {
    const bool sound = tensor.is_object() && tensor.contains("name") && tensor["name"].is_string() &&
                       tensor.contains("sha256") && is_hash(tensor["sha256"]);
    if (!sound) return malformed;
    out.tensors.emplace_back(tensor["name"].get<std::string>(), tensor["sha256"].get<std::string>());
  }
  return out;
}

}  // namespace parvl
