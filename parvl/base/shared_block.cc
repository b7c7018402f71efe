#include "parvl/base/shared_block.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "parvl/base/file.h"
#include "parvl/base/memory.h"

namespace parvl {
namespace {

// The seal is also the sign that a block is whole: only who filled it sets it.
constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int64_t kIdentityBytes = 32;  // after the content: SHA-256

absl::Status errno_status(const std::string& what) {
  const std::string message = absl::StrCat("cannot ", what, ": ", std::strerror(errno));
  return errno == ENOENT ? absl::NotFoundError(message) : absl::ResourceExhaustedError(message);
}

absl::StatusOr<std::byte*> map(const FileDescriptor& block, int64_t bytes, int protection) {
  void* const data = ::mmap(nullptr, static_cast<size_t>(bytes), protection, MAP_SHARED, block.get(), 0);
  if (data == MAP_FAILED) return errno_status(absl::StrCat("map ", bytes, " bytes of shared memory"));
  ::madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // where the system allows it for shared memory
  return static_cast<std::byte*>(data);
}

// Before the first page is written: a full memory would end a process that touches it instead of saying so. The system
// gives shared memory until there is none at all, so it is asked only for what there is.
absl::Status take_memory(const FileDescriptor& block, int64_t bytes) {
  // Who died in the middle left what it took: it is to be had again.
  if (::ftruncate(block.get(), 0) != 0) return errno_status("empty shared memory");
  if (const int64_t there = available_bytes(); there > 0 && bytes > there) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot get ", bytes, " bytes of shared memory: ", there, " are available"));
  }
  if (::fallocate(block.get(), 0, 0, bytes) == 0) return absl::OkStatus();
  const absl::Status status = errno_status(absl::StrCat("get ", bytes, " bytes of shared memory"));
  (void)::ftruncate(block.get(), 0);
  return status;
}

absl::Status fill_block(const FileDescriptor& block, int64_t bytes, const std::array<uint8_t, 32>& identity,
                        const SharedContent::Fill& fill) {
  PARVL_RETURN_IF_ERROR(take_memory(block, bytes + kIdentityBytes));
  PARVL_ASSIGN_OR_RETURN(std::byte* const data, map(block, bytes + kIdentityBytes, PROT_READ | PROT_WRITE));
  absl::Status status = fill({data, static_cast<size_t>(bytes)});
  if (status.ok()) std::memcpy(data + bytes, identity.data(), identity.size());
  ::munmap(data, static_cast<size_t>(bytes + kIdentityBytes));
  if (status.ok() && ::fcntl(block.get(), F_ADD_SEALS, kSeals) != 0) status = errno_status("seal shared memory");
  if (!status.ok()) (void)::ftruncate(block.get(), 0);
  return status;
}

bool is_filled(const FileDescriptor& block) {
  const int seals = ::fcntl(block.get(), F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_WRITE) != 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedBlock>> SharedBlock::create(const std::string& label) {
  FileDescriptor memory(::memfd_create(label.substr(0, 100).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory) return errno_status("make shared memory");
  std::string path = absl::StrCat("/proc/", ::getpid(), "/fd/", memory.get());
  return std::unique_ptr<SharedBlock>(new SharedBlock(std::move(memory), std::move(path)));
}

absl::StatusOr<std::shared_ptr<const SharedContent>> SharedContent::open(const std::string& path, int64_t bytes,
                                                                         std::string_view identity, const Fill& fill) {
  const std::array<uint8_t, 32> hash = sha256(identity);
  bool filled_here = false;
  {
    const FileDescriptor block(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!block) return errno_status("open shared memory");
    // The lock is the open file's, so it ends with this process at the latest.
    while (::flock(block.get(), LOCK_EX) != 0) {
      if (errno != EINTR) return errno_status("lock shared memory");
    }
    filled_here = !is_filled(block);
    if (filled_here) PARVL_RETURN_IF_ERROR(fill_block(block, bytes, hash, fill));
  }
  const FileDescriptor block(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat found {};
  if (!block || ::fstat(block.get(), &found) != 0) return errno_status("open shared memory");
  if (!is_filled(block) || found.st_size != bytes + kIdentityBytes) {
    return invalid("the shared memory holds ", found.st_size, " bytes, not the ", bytes, " of what is wanted here");
  }
  PARVL_ASSIGN_OR_RETURN(const std::byte* const data, map(block, found.st_size, PROT_READ));
  auto out = std::shared_ptr<const SharedContent>(new SharedContent(data, bytes, found.st_size, filled_here));
  if (std::memcmp(data + bytes, hash.data(), hash.size()) == 0) return out;
  return invalid("the shared memory holds something else than what is wanted here");
}

SharedContent::~SharedContent() { ::munmap(const_cast<std::byte*>(data_), static_cast<size_t>(mapped_)); }

int64_t shared_bytes(absl::Span<const std::string> paths) {
  int64_t out = 0;
  for (const std::string& path : paths) {
    const FileDescriptor block(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat found {};
    if (!block || ::fstat(block.get(), &found) != 0) continue;
    out += std::max<int64_t>(0, found.st_size - kIdentityBytes);
  }
  return out;
}

}  // namespace parvl
