// Files: bounded reads, read-only maps, SHA-256, and writes that are either whole or not there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "parvl/base/status.h"

namespace parvl {

// The whole file; NotFound when it does not exist, InvalidArgument when it is longer than `max_bytes` or no plain file.
absl::StatusOr<std::string> read_file(const std::string& path, size_t max_bytes = size_t{1} << 30);

// Writes path + ".tmp", syncs it to disk, and renames it over `path`. On failure (disk full, say) `path` is as it was
// and the temporary file is gone.
absl::Status write_file_atomically(const std::string& path, std::string_view content);

// Writes a file that a directory-level rename will publish later: created, filled in chunks by `write`, synced, closed.
class FileWriter {
 public:
  static absl::StatusOr<std::unique_ptr<FileWriter>> create(const std::string& path);
  ~FileWriter();  // closes; what was not `finish`ed is not promised to be on disk
  absl::Status append(const void* data, size_t bytes);
  absl::Status finish();  // sync and close; later calls fail

 private:
  struct State;
  explicit FileWriter(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// fsync on a directory, so that a rename inside it survives a power cut.
absl::Status sync_directory(const std::string& path);

// A read-only shared mapping of a whole file. Thread-safe once made. The file must not be truncated while mapped.
class MappedFile {
 public:
  static absl::StatusOr<std::shared_ptr<MappedFile>> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::string_view bytes() const { return {data_, size_}; }
  // Lets the system take back the memory of a range that will not be read again soon; reading it again is still right.
  void drop(size_t offset, size_t bytes) const;

 private:
  MappedFile(const char* data, size_t size) : data_(data), size_(size) {}
  const char* data_;
  size_t size_;
};

std::string sha256_hex(std::string_view bytes);
std::array<uint8_t, 32> sha256(std::string_view bytes);
// Of a whole file, read in pieces.
absl::StatusOr<std::string> sha256_file(const std::string& path);

}  // namespace parvl
