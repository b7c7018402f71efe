// A file's bytes → what a vision encoder reads, wherever that is computed.
#pragma once

#include <string_view>

#include "parvl/media/image.h"
#include "parvl/media/image_processor.h"

namespace parvl {

// Thread-safe.
class ImageSource {
 public:
  virtual ~ImageSource() = default;
  // Decodes and processes; the key is set. ResourceExhausted for a file over a limit, InvalidArgument for one that is
  // broken, each with the reason.
  virtual absl::StatusOr<ProcessedImage> prepare(std::string_view file, const ImageLimits& limits,
                                                 const ImageProcessor& processor) = 0;
};

// All of it but the patches, from the file's header alone; the key is set. Errors as ImageSource::prepare.
absl::StatusOr<ProcessedImage> outline_image(std::string_view file, const ImageLimits& limits,
                                             const ImageProcessor& processor);
// The patches of a file that has this outline. Likewise.
absl::Status fill_patches(std::string_view file, const ImageLimits& limits, const ImageProcessor& processor,
                          absl::Span<float> patches);

// In this process.
class LocalImages : public ImageSource {
 public:
  absl::StatusOr<ProcessedImage> prepare(std::string_view file, const ImageLimits& limits,
                                         const ImageProcessor& processor) override;
};

}  // namespace parvl
