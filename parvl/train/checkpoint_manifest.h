// trainer/manifest.json of a checkpoint: the hashes that its files were written with. Written last, it makes the
// checkpoint valid; what it does not name directly (the parts of the optimizer's state), a file that it names does.
#pragma once

#include <map>
#include <string>

#include "parvl/base/json.h"
#include "parvl/models/tensor_file.h"

namespace parvl {

inline constexpr char kManifestFile[] = "trainer/manifest.json";

// By path inside the checkpoint.
struct CheckpointManifest {
  std::map<std::string, std::string> files;         // SHA-256 of the whole file, in hex
  std::map<std::string, TensorFileHashes> weights;  // of the Hugging Face directory
};

// Hashes what lies in `dir` beside the weights and safetensors files in trainer/, whose hashes are in a file beside
// them, and writes the manifest.
absl::Status write_manifest(const std::string& dir, const std::map<std::string, TensorFileHashes>& weights);

// InvalidArgument naming DIR: no manifest, one that is not as it was written, one of another format.
absl::StatusOr<CheckpointManifest> read_manifest(const std::string& dir);

// A file of the manifest, whole, with the hash it was written with; else InvalidArgument naming it. Not in the
// manifest: the same.
absl::StatusOr<std::string> read_checked(const std::string& dir, const CheckpointManifest& manifest,
                                         const std::string& file);

// Of a tensor file's hashes; InvalidArgument when it is none.
Json to_json(const TensorFileHashes& hashes);
absl::StatusOr<TensorFileHashes> hashes_from_json(const Json& json);

}  // namespace parvl
