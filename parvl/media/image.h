// Still images: bytes of a file → RGB pixels. Same colours as PIL's Image.open(...).convert("RGB") with the rules
// below.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/status.h"

namespace parvl {

// Interleaved 8-bit RGB, rows top to bottom, no padding: rgb.size() = 3 · width · height.
struct Image {
  int width = 0;
  int height = 0;
  std::vector<uint8_t> rgb;
};

struct ImageLimits {
  size_t max_bytes = 64u << 20;     // of the encoded file
  int64_t max_pixels = 64ll << 20;  // width · height as the header says, checked before any pixel is decoded
};

// Width and height from the header alone, orientation applied. Errors as decode_image.
struct ImageSize {
  int width = 0;
  int height = 0;
};
absl::StatusOr<ImageSize> read_image_size(std::string_view bytes, const ImageLimits& limits = {});

// Decodes JPEG, PNG, WebP or the first frame of a GIF. EXIF orientation is applied; alpha (also palette and grey with
// alpha) is composited on white; 16-bit is scaled to 8; 1-bit, palette, grey and CMYK/YCCK become RGB. A file that is
// truncated or corrupt, of another format, or over a limit is InvalidArgument with the reason. Thread-safe.
absl::StatusOr<Image> decode_image(std::string_view bytes, const ImageLimits& limits = {});

// Encodes as PNG (for examples and tests).
std::string encode_png(const Image& image);

// One of the eight symmetries of the square: `index` 0..7 = (index & 4 ? transpose : identity), then index & 3 quarter
// turns.
Image dihedral(const Image& image, int index);

}  // namespace parvl
