#include "parvl/train/data_image_cache.h"

#include "parvl/base/file.h"

namespace parvl {

absl::StatusOr<std::shared_ptr<const Image>> ImageCache::get(const std::string& path) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = images_.find(path);
    if (found != images_.end()) {
      ++hits_;
      return found->second;
    }
  }
  // Outside the lock; two threads may decode the same file, which costs time and changes nothing.
  PARVL_ASSIGN_OR_RETURN(const std::string bytes, read_file(path, ImageLimits{}.max_bytes));
  auto decoded = decode_image(bytes);
  if (!decoded.ok()) return with_context(decoded.status(), path);
  auto image = std::make_shared<const Image>(*std::move(decoded));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes_ + image->rgb.size() <= max_bytes_ && images_.emplace(path, image).second) bytes_ += image->rgb.size();
  return image;
}

size_t ImageCache::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

size_t ImageCache::hits() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return hits_;
}

}  // namespace parvl
