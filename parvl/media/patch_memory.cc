#include "parvl/media/patch_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace parvl {
namespace {

class LocalMemory : public PatchMemory {
 public:
  explicit LocalMemory(int descriptor) : descriptor_(descriptor) {}
  ~LocalMemory() override { ::close(descriptor_); }

  int descriptor() const override { return descriptor_; }
  // The checksum is for those who are sent them.
  absl::Status finish(uint64_t, ProcessedImage& image) override {
    const auto values = static_cast<size_t>(image.num_values());
    const void* const from = ::mmap(nullptr, values * sizeof(float), PROT_READ, MAP_SHARED, descriptor_, 0);
    if (from == MAP_FAILED) return failed("cannot map the patches of an image: ", std::strerror(errno));
    image.patches.assign(static_cast<const float*>(from), static_cast<const float*>(from) + values);
    ::munmap(const_cast<void*>(from), values * sizeof(float));
    return absl::OkStatus();
  }

 private:
  const int descriptor_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PatchMemory>> LocalPatches::reserve(const ProcessedImage& outline) {
  const int64_t bytes = outline.num_values() * static_cast<int64_t>(sizeof(float));
  const int descriptor = ::memfd_create("parvl-patches", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return absl::AbortedError(absl::StrCat("no memory for an image: ", std::strerror(errno)));
  auto out = std::make_unique<LocalMemory>(descriptor);
  // Whoever writes to it must not take it away from under whoever reads.
  if (::ftruncate(descriptor, bytes) != 0 || ::fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return absl::AbortedError(absl::StrCat("no memory for an image: ", std::strerror(errno)));
  }
  return out;
}

}  // namespace parvl
