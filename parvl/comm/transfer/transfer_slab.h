// Pieces of shared memory, owned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "parvl/base/status.h"
#include "parvl/comm/transfer/transfer_socket.h"

namespace parvl {

// A mapping of memory that has no name: it is gone when the last process has unmapped and closed it, however that
// ended.
class SharedSlab {
 public:
  // New, of this size for ever, writable here; `label` shows in /proc. ResourceExhausted: no memory, or
  // so few descriptors that others of this process will need them.
  static absl::StatusOr<std::unique_ptr<SharedSlab>> create(int64_t bytes, const std::string& label);
  // Another process's, read-only. InvalidArgument: it could shrink under the reader, or is smaller than `bytes`;
  // ResourceExhausted: no descriptor came, since this process has no number left for one.
  static absl::StatusOr<std::unique_ptr<SharedSlab>> map(const FileDescriptor& descriptor, int64_t bytes);
  ~SharedSlab();
  SharedSlab(const SharedSlab&) = delete;
  SharedSlab& operator=(const SharedSlab&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // For others, to read only; of a slab that was created here.
  int read_only_descriptor() const { return read_only_.get(); }
  // The same to write as well, for another process to fill; of a slab that was created here.
  absl::StatusOr<FileDescriptor> open_to_write() const;
  // Gives the memory back to the system also where another process still maps it, without reading. Of a slab that was
  // created here.
  void discard();

 private:
  SharedSlab(FileDescriptor read_only, std::byte* data, int64_t bytes);
  const FileDescriptor read_only_;
  std::byte* const data_;
  const int64_t bytes_;
};

}  // namespace parvl
