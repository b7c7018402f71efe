// Memory that several processes of this machine map to read, and that the first of them fills. It has no name in a file
// system: it is gone when nobody holds or maps it, however they ended.
#pragma once

#include <absl/types/span.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "parvl/base/file_descriptor.h"
#include "parvl/base/status.h"

namespace parvl {

// What one process holds open for the others: empty memory of no size, until one of them fills it.
class SharedBlock {
 public:
  // `label` shows in /proc. ResourceExhausted: no descriptors.
  static absl::StatusOr<std::unique_ptr<SharedBlock>> create(const std::string& label);
  // By which processes of the same user and machine reach it while this one lives.
  const std::string& path() const { return path_; }

 private:
  SharedBlock(FileDescriptor memory, std::string path) : memory_(std::move(memory)), path_(std::move(path)) {}
  const FileDescriptor memory_;
  const std::string path_;
};

// A block that is filled, read-only. Thread-safe.
class SharedContent {
 public:
  using Fill = std::function<absl::Status(absl::Span<std::byte>)>;

  // Fills the block at `path` with `bytes` bytes where nobody has, and waits where somebody is at it. Who ends in the
  // middle or gives an error leaves the block to the next. `identity` says what the content is: InvalidArgument when
  // the block was filled with something else; NotFound: there is no such block any more.
  static absl::StatusOr<std::shared_ptr<const SharedContent>> open(const std::string& path, int64_t bytes,
                                                                   std::string_view identity, const Fill& fill);
  ~SharedContent();
  SharedContent(const SharedContent&) = delete;
  SharedContent& operator=(const SharedContent&) = delete;

  const std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  bool filled_here() const { return filled_here_; }

 private:
  SharedContent(const std::byte* data, int64_t bytes, int64_t mapped, bool filled_here)
      : data_(data), bytes_(bytes), mapped_(mapped), filled_here_(filled_here) {}
  const std::byte* const data_;
  const int64_t bytes_, mapped_;
  const bool filled_here_;
};

// What the blocks at these paths have taken for their content, of all together: from when one is being filled, also
// where who filled it died. 0 for a block that nobody has filled, and where there is none.
int64_t shared_bytes(absl::Span<const std::string> paths);

}  // namespace parvl
