#include "apps/media_files.h"

#include <utility>

#include "parvl/base/file.h"
#include "parvl/media/image.h"

namespace parvl {

absl::StatusOr<std::vector<std::shared_ptr<const ProcessedImage>>> read_image_files(
    const std::vector<std::string>& paths, const PromptBuilder& prompts) {
  if (!paths.empty() && !prompts.has_images()) return invalid("--image ", paths[0], ": ", prompts.why_no_images());
  std::vector<std::shared_ptr<const ProcessedImage>> images;
  const ImageLimits limits;
  for (const std::string& path : paths) {
    PARVL_ASSIGN_OR_RETURN(const std::string bytes, read_file(path, limits.max_bytes));
    absl::StatusOr<Image> image = decode_image(bytes, limits);
    if (!image.ok()) return with_context(image.status(), path);
    absl::StatusOr<ProcessedImage> processed = prompts.image_processor().process(*image);
    if (!processed.ok()) return with_context(processed.status(), path);
    images.push_back(std::make_shared<const ProcessedImage>(std::move(*processed)));
  }
  return images;
}

}  // namespace parvl
