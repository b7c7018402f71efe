#include "parvl/comm/transfer/transfer_slab.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace parvl {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr rlim_t kOtherDescriptors = 64;  // which memory that is kept for others must not take from their connections

absl::Status no_memory(const std::string& what, int64_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot ", what, " ", bytes, " bytes of shared memory: ", std::strerror(errno)));
}

// The system gives out the lowest number that is free.
bool is_one_of_the_last(const FileDescriptor& descriptor) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return false;
  return static_cast<rlim_t>(descriptor.get()) >= limit.rlim_cur - std::min(kOtherDescriptors, limit.rlim_cur / 4);
}

}  // namespace

SharedSlab::SharedSlab(FileDescriptor read_only, std::byte* data, int64_t bytes)
    : read_only_(std::move(read_only)), data_(data), bytes_(bytes) {}

SharedSlab::~SharedSlab() { ::munmap(data_, static_cast<size_t>(bytes_)); }

absl::StatusOr<std::unique_ptr<SharedSlab>> SharedSlab::create(int64_t bytes, const std::string& label) {
  FileDescriptor own(::memfd_create(label.substr(0, 100).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!own || ::ftruncate(own.get(), bytes) != 0 || ::fcntl(own.get(), F_ADD_SEALS, kSeals) != 0) {
    return no_memory("make", bytes);
  }
  FileDescriptor read_only(::open(absl::StrCat("/proc/self/fd/", own.get()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!read_only) return no_memory("open", bytes);
  if (is_one_of_the_last(read_only)) {
    return absl::ResourceExhaustedError("too few descriptors are left for more shared memory (`ulimit -n`)");
  }
  void* const data = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, own.get(), 0);
  if (data == MAP_FAILED) return no_memory("map", bytes);
  return std::unique_ptr<SharedSlab>(new SharedSlab(std::move(read_only), static_cast<std::byte*>(data), bytes));
}

absl::StatusOr<std::unique_ptr<SharedSlab>> SharedSlab::map(const FileDescriptor& descriptor, int64_t bytes) {
  // The system drops one that comes while the process has as many as it may.
  if (!descriptor) {
    return absl::ResourceExhaustedError(
        "the descriptor of the shared memory did not arrive, as when this process has as many as it may (`ulimit -n`)");
  }
  struct stat found {};
  const int seals = ::fcntl(descriptor.get(), F_GET_SEALS);
  if (bytes <= 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(descriptor.get(), &found) != 0 ||
      found.st_size < bytes) {
    return invalid("what came as shared memory could shrink, or is smaller than ", bytes, " bytes");
  }
  void* const data =
      ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED | MAP_POPULATE, descriptor.get(), 0);
  if (data == MAP_FAILED) return no_memory("map", bytes);
  return std::unique_ptr<SharedSlab>(new SharedSlab(FileDescriptor(), static_cast<std::byte*>(data), bytes));
}

absl::StatusOr<FileDescriptor> SharedSlab::open_to_write() const {
  FileDescriptor out(::open(absl::StrCat("/proc/self/fd/", read_only_.get()).c_str(), O_RDWR | O_CLOEXEC));
  if (!out) return no_memory("open", bytes_);
  return out;
}

void SharedSlab::discard() { ::madvise(data_, static_cast<size_t>(bytes_), MADV_REMOVE); }

}  // namespace parvl
