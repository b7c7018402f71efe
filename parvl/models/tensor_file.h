// A safetensors file with a hash of every tensor: written one tensor after another, checked one by one. Torch-free.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parvl/base/file.h"
#include "parvl/models/safetensors.h"

namespace parvl {

// What a file was written with. Hashes are SHA-256 in hex.
struct TensorFileHashes {
  uint64_t bytes = 0;                                        // of the whole file
  std::string header;                                        // of what stands before the first tensor
  std::vector<std::pair<std::string, std::string>> tensors;  // name and hash of its bytes, in the file's order
};

// One thread.
class TensorFileWriter {
 public:
  // Makes the file with a header for these tensors (offsets are not read), whose bytes are to follow in this order.
  // ResourceExhausted when the disk is full, as for the calls below.
  static absl::StatusOr<std::unique_ptr<TensorFileWriter>> create(const std::string& path,
                                                                  std::vector<TensorEntry> tensors);
  // The whole next tensor, in host memory.
  absl::Status append(const void* data, size_t bytes);
  // After the last tensor: syncs and closes.
  absl::StatusOr<TensorFileHashes> finish();

 private:
  TensorFileWriter(std::unique_ptr<FileWriter> file, std::vector<TensorEntry> tensors)
      : file_(std::move(file)), tensors_(std::move(tensors)) {}
  std::unique_ptr<FileWriter> file_;
  std::vector<TensorEntry> tensors_;
  TensorFileHashes hashes_;
};

// A file whose size, header and names are those of its hashes. Thread-safe once made.
struct CheckedTensorFile {
  std::shared_ptr<MappedFile> mapped;
  std::vector<TensorEntry> entries;  // as TensorFileHashes::tensors
  std::string_view bytes(size_t index) const {
    return mapped->bytes().substr(entries[index].offset, entries[index].bytes);
  }
};
// `name` is the file's in messages. InvalidArgument saying what is not as it was written; no tensor is read.
absl::StatusOr<CheckedTensorFile> open_tensor_file(const std::string& path, const TensorFileHashes& hashes,
                                                   const std::string& name);
// Reads the tensors that `wanted` takes, by their index, and names the first that is not as it was written.
absl::Status check_tensor_file(const std::string& path, const TensorFileHashes& hashes, const std::string& name,
                               const std::function<bool(size_t index)>& wanted);

}  // namespace parvl
