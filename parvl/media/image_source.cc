#include "parvl/media/image_source.h"

#include <limits>

namespace parvl {

absl::StatusOr<ProcessedImage> outline_image(std::string_view file, const ImageLimits& limits,
                                             const ImageProcessor& processor) {
  if (file.size() > limits.max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("it has ", file.size(), " bytes, over the limit of ", limits.max_bytes));
  }
  ImageLimits header_only = limits;
  header_only.max_pixels = std::numeric_limits<int64_t>::max();
  PARVL_ASSIGN_OR_RETURN(const ImageSize size, read_image_size(file, header_only));
  if (int64_t{size.width} * size.height > limits.max_pixels) {
    return absl::ResourceExhaustedError(
        absl::StrCat("it has ", size.width, " x ", size.height, " pixels, over the limit of ", limits.max_pixels));
  }
  PARVL_ASSIGN_OR_RETURN(ProcessedImage out, processor.outline(size));
  out.key = processor.key_of(file);
  return out;
}

absl::Status fill_patches(std::string_view file, const ImageLimits& limits, const ImageProcessor& processor,
                          absl::Span<float> patches) {
  PARVL_ASSIGN_OR_RETURN(const Image image, decode_image(file, limits));
  return processor.fill(image, patches);
}

absl::StatusOr<ProcessedImage> LocalImages::prepare(std::string_view file, const ImageLimits& limits,
                                                    const ImageProcessor& processor) {
  PARVL_ASSIGN_OR_RETURN(ProcessedImage out, outline_image(file, limits, processor));
  out.patches.resize(static_cast<size_t>(out.num_values()));
  PARVL_RETURN_IF_ERROR(fill_patches(file, limits, processor, absl::MakeSpan(out.patches)));
  return out;
}

}  // namespace parvl
