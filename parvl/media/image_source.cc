#include "parvl/media/image_source.h"

#include <limits>

namespace parvl {

absl::StatusOr<ProcessedImage> LocalImages::prepare(std::string_view file, const ImageLimits& limits,
                                                    const ImageProcessor& processor) {
  if (file.size() > limits.max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("it has ", file.size(), " bytes, over the limit of ", limits.max_bytes));
  }
  ImageLimits header_only = limits;
  header_only.max_pixels = std::numeric_limits<int64_t>::max();
  const absl::StatusOr<ImageSize> size = read_image_size(file, header_only);
  if (size.ok() && int64_t{size->width} * size->height > limits.max_pixels) {
    return absl::ResourceExhaustedError(
        absl::StrCat("it has ", size->width, " x ", size->height, " pixels, over the limit of ", limits.max_pixels));
  }
  PARVL_ASSIGN_OR_RETURN(const Image image, decode_image(file, limits));
  PARVL_ASSIGN_OR_RETURN(ProcessedImage out, processor.process(image));
  out.key = processor.key_of(file);
  return out;
}

}  // namespace parvl
