// Decoded images, so that each file of a small set is read and decoded once.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "parvl/base/status.h"
#include "parvl/media/image.h"

namespace parvl {

// Keeps the first images that fit into `max_bytes` of pixels and never drops one: every epoch visits the whole set
// once, in a new order, where keeping a fixed share hits that share of the time and dropping the oldest would hardly
// hit. Thread-safe.
class ImageCache {
 public:
  explicit ImageCache(size_t max_bytes) : max_bytes_(max_bytes) {}
  // The decoded file, from the cache when it is there. Errors name the path.
  absl::StatusOr<std::shared_ptr<const Image>> get(const std::string& path);
  size_t bytes() const;
  size_t hits() const;

 private:
  const size_t max_bytes_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const Image>> images_;
  size_t bytes_ = 0;
  size_t hits_ = 0;
};

}  // namespace parvl
