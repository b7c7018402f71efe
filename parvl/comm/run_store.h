// What all ranks of a run can write to and read, also while a collective call hangs.
#pragma once

#include <optional>
#include <string>

#include "parvl/base/status.h"

namespace parvl {

// Names and values. One thread. An error means that the store cannot be reached; the message says where it is. A call
// may take as long as the process that holds the store is stopped.
class Store {
 public:
  virtual ~Store() = default;
  virtual absl::Status set(const std::string& key, const std::string& value) = 0;
  // What is there now; nothing: none.
  virtual absl::StatusOr<std::optional<std::string>> look(const std::string& key) = 0;
  // Waits for the key to be there, at most so long; then DeadlineExceeded.
  virtual absl::StatusOr<std::string> get(const std::string& key, double timeout_s) = 0;
  virtual absl::Status erase(const std::string& key) = 0;

  virtual std::string where() const = 0;            // "the store of rank 0 at 127.0.0.1:29500"
  virtual bool ends_with_this_process() const = 0;  // whether others lose it when this rank leaves
};

}  // namespace parvl
