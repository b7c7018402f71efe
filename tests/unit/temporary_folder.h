// A folder for a test's files.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "parvl/base/check.h"

namespace parvl {

// A new folder that is removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "parvl_test_XXXXXX").string();
    PARVL_CHECK(::mkdtemp(name.data()) != nullptr, "cannot make a temporary folder");
    path_ = std::filesystem::canonical(name).string();
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace parvl
