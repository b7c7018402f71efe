// Pixels → what a vision encoder reads: resized, normalised and cut into patches, equal to the PIL-backed Hugging Face
// processor of the Qwen2-VL family (dynamic resolution: any size, sides rounded to multiples of patch · merge).
#pragma once

#include <absl/types/span.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/media/image.h"

namespace parvl {

// Patches that lie where other processes read them: there while this lives. `handle` is for those who know how.
class PatchPlace {
 public:
  virtual ~PatchPlace() = default;
  virtual const std::string& handle() const = 0;
};

// grid_t · grid_h · grid_w patches, row-major in merge order (each merge × merge square of patches is contiguous), each
// patch [channel, temporal_patch, patch, patch] float32.
struct ProcessedImage {
  int grid_t = 0;
  int grid_h = 0;
  int grid_w = 0;
  int patch_floats = 0;  // values a patch
  int merge_size = 1;
  // Identity of what this was made from: SHA-256 of the source file's bytes, the processor's version and settings. All
  // zero: not known.
  std::array<uint8_t, 32> key{};
  std::vector<float> patches;               // [num_values()]; empty when they lie in `place`
  std::shared_ptr<const PatchPlace> place;  // null: they are here
  int64_t num_patches() const { return int64_t{grid_t} * grid_h * grid_w; }
  int64_t num_values() const { return num_patches() * patch_floats; }
  int64_t num_tokens() const { return num_patches() / (merge_size * merge_size); }  // after the projector's merge
};

struct ImageProcessorConfig {
  int patch_size = 14;
  int temporal_patch_size = 2;
  int merge_size = 2;
  int64_t min_pixels = 56 * 56;
  int64_t max_pixels = 28 * 28 * 1280;
  bool do_resize = true;
  bool do_rescale = true;
  bool do_normalize = true;
  double rescale_factor = 1.0 / 255.0;
  std::vector<double> mean = {0.48145466, 0.4578275, 0.40821073};
  std::vector<double> std = {0.26862954, 0.26130258, 0.27577711};
  int resample = 3;  // PIL's numbers: 2 bilinear, 3 bicubic
};

// Immutable after load; thread-safe.
class ImageProcessor {
 public:
  explicit ImageProcessor(ImageProcessorConfig config) : config_(std::move(config)) {}
  // Reads preprocessor_config.json of a Hugging Face directory (both the min_pixels/max_pixels and the `size`
  // spelling).
  static absl::StatusOr<ImageProcessor> load(const std::string& dir);

  // InvalidArgument for what the Hugging Face processor refuses (aspect ratio of 200 or more), naming the sides.
  absl::StatusOr<ProcessedImage> process(const Image& image) const;
  // The same in two parts: all but the patches, of an image of this size; and the patches, num_values() of that.
  absl::StatusOr<ProcessedImage> outline(const ImageSize& size) const;
  absl::Status fill(const Image& image, absl::Span<float> patches) const;
  // The size `process` resizes to (width, height), without touching pixels.
  absl::StatusOr<ImageSize> target_size(int width, int height) const;
  const ImageProcessorConfig& config() const { return config_; }
  // ProcessedImage::key of a source file with these bytes: equal only when `process` gives equal patches.
  std::array<uint8_t, 32> key_of(std::string_view source) const;

 private:
  ImageProcessorConfig config_;
};

// PIL's Image.resize on 8-bit RGB, to the bit (antialiased two-pass convolution in fixed point). `resample` as in PIL.
Image resize_like_pil(const Image& image, int width, int height, int resample);

}  // namespace parvl
