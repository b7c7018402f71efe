// What the image formats' readers share: one pair of functions a format, called by image.cc only.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/media/image.h"

namespace parvl {

// What a file's header says, before any pixel is decoded; sides as stored, not yet turned.
struct ImageHeader {
  int64_t width = 0;
  int64_t height = 0;
  int orientation = 1;  // EXIF's 1..8
};

// Each reader gets bytes that start with its format's signature. `decode_*` is called after the header was read and its
// pixel count accepted; it fails when the data do not give the pixels the header promised.
absl::StatusOr<ImageHeader> read_jpeg_header(std::string_view bytes);
absl::StatusOr<Image> decode_jpeg(std::string_view bytes);
absl::StatusOr<ImageHeader> read_png_header(std::string_view bytes);
absl::StatusOr<Image> decode_png(std::string_view bytes);
absl::StatusOr<ImageHeader> read_webp_header(std::string_view bytes);
absl::StatusOr<Image> decode_webp(std::string_view bytes);
absl::StatusOr<ImageHeader> read_gif_header(std::string_view bytes);
absl::StatusOr<Image> decode_gif(std::string_view bytes);

// The orientation in an EXIF block (a TIFF structure, with or without "Exif\0\0" before it); 1 when there is none or
// the block makes no sense.
int exif_orientation(std::string_view exif);

// RGBA (4 bytes a pixel, not premultiplied) over white → RGB.
Image composite_on_white(const std::vector<uint8_t>& rgba, int width, int height);

// The image turned as EXIF's orientation 1..8 asks.
Image apply_orientation(const Image& image, int orientation);

}  // namespace parvl
