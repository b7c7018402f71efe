// TensorBoard event files: scalars by tag and step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "parvl/base/file.h"
#include "parvl/base/status.h"

namespace parvl {

// CRC-32C (Castagnoli), as event files use it.
uint32_t crc32c(std::string_view bytes);

// One event file. Not thread-safe.
class EventWriter {
 public:
  // Makes `folder` if it is missing and a new file in it (an earlier run's file is never touched); TensorBoard shows
  // all files of a folder as one run. `wall_seconds`: seconds since 1970.
  static absl::StatusOr<std::unique_ptr<EventWriter>> create(const std::string& folder, double wall_seconds);

  // Appends one record, whole or, on a full disk say, with an error; after an error every later call returns it, since
  // a reader stops at a torn record anyway. The operating system has the record when this returns.
  absl::Status scalars(int64_t step, double wall_seconds, const std::vector<std::pair<std::string, double>>& values);
  const std::string& path() const { return path_; }

 private:
  EventWriter(std::string path, std::unique_ptr<FileWriter> file) : path_(std::move(path)), file_(std::move(file)) {}
  absl::Status record(std::string_view event);

  std::string path_;
  std::unique_ptr<FileWriter> file_;
  absl::Status broken_;
};

}  // namespace parvl
