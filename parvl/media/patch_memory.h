// Memory that a decoding process writes an image's patches into: they go to whoever reads them without a copy that
// passes through the server.
#pragma once

#include <cstdint>
#include <memory>

#include "parvl/base/status.h"
#include "parvl/media/image_processor.h"

namespace parvl {

// For one image; gives itself back when destroyed, after which nobody may write to it any more. One thread at a time.
class PatchMemory {
 public:
  virtual ~PatchMemory() = default;
  // Of memory whose beginning holds the patches; to map and write. Open as long as this lives.
  virtual int descriptor() const = 0;
  // They are written, with this tensor_checksum (base/checksum.h): now they are `image`'s.
  virtual absl::Status finish(uint64_t checksum, ProcessedImage& image) = 0;
};

// Any thread.
class PatchStore {
 public:
  virtual ~PatchStore() = default;
  // For the patches of an image with this outline. Does not wait: Aborted when others' leave no room.
  virtual absl::StatusOr<std::unique_ptr<PatchMemory>> reserve(const ProcessedImage& outline) = 0;
};

// They end up in ProcessedImage::patches.
class LocalPatches : public PatchStore {
 public:
  absl::StatusOr<std::unique_ptr<PatchMemory>> reserve(const ProcessedImage& outline) override;
};

}  // namespace parvl
