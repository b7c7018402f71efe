#include "parvl/media/image.h"

#include <cstring>

#include "parvl/base/check.h"
#include "parvl/media/image_codec.h"

namespace parvl {
namespace {

struct Format {
  const char* name;
  absl::StatusOr<ImageHeader> (*read_header)(std::string_view);
  absl::StatusOr<Image> (*decode)(std::string_view);
};

bool starts_with(std::string_view bytes, std::string_view prefix, size_t at = 0) {
  return bytes.size() >= at + prefix.size() && bytes.substr(at, prefix.size()) == prefix;
}

// What a file that we cannot read seems to be, for the error message.
const char* guess_foreign_format(std::string_view bytes) {
  if (starts_with(bytes, "BM")) return "it looks like BMP";
  if (starts_with(bytes, std::string_view("II*\0", 4)) || starts_with(bytes, std::string_view("MM\0*", 4))) {
    return "it looks like TIFF";
  }
  if (starts_with(bytes, "ftyp", 4)) return "it looks like HEIC, AVIF or a video";
  if (starts_with(bytes, "%PDF")) return "it looks like PDF";
  if (starts_with(bytes, "<svg") || starts_with(bytes, "<?xml")) return "it looks like SVG";
  if (starts_with(bytes, "<")) return "it looks like a web page";
  return "its first bytes name no format we know";
}

absl::StatusOr<Format> detect(std::string_view bytes, const ImageLimits& limits) {
  if (bytes.size() > limits.max_bytes) {
    return invalid("image file of ", bytes.size(), " bytes is over the limit of ", limits.max_bytes, " bytes");
  }
  if (bytes.empty()) return invalid("image file is empty");
  if (starts_with(bytes, "\xFF\xD8\xFF")) return Format{"JPEG", read_jpeg_header, decode_jpeg};
  if (starts_with(bytes, "\x89PNG\r\n\x1A\n")) return Format{"PNG", read_png_header, decode_png};
  if (starts_with(bytes, "RIFF") && starts_with(bytes, "WEBP", 8)) return Format{"WebP", read_webp_header, decode_webp};
  if (starts_with(bytes, "GIF87a") || starts_with(bytes, "GIF89a")) return Format{"GIF", read_gif_header, decode_gif};
  return invalid("not a JPEG, PNG, WebP or GIF image (", guess_foreign_format(bytes), "); convert it to one of these");
}

absl::StatusOr<ImageHeader> checked_header(const Format& format, std::string_view bytes, const ImageLimits& limits) {
  auto header = format.read_header(bytes);
  if (!header.ok()) return with_context(header.status(), absl::StrCat("truncated or corrupt ", format.name));
  if (header->width <= 0 || header->height <= 0) {
    return invalid("truncated or corrupt ", format.name, ": its header says ", header->width, "x", header->height,
                   " pixels");
  }
  if (header->height > limits.max_pixels / header->width) {
    return invalid(format.name, " of ", header->width, "x", header->height, " pixels is over the limit of ",
                   limits.max_pixels, " pixels; scale it down");
  }
  return header;
}

bool swaps_sides(int orientation) { return orientation >= 5 && orientation <= 8; }

uint32_t read_uint(std::string_view bytes, size_t at, int count, bool big_endian) {
  uint32_t value = 0;
  for (int i = 0; i < count; ++i) {
    const auto byte = static_cast<uint8_t>(bytes[at + static_cast<size_t>(big_endian ? i : count - 1 - i)]);
    value = value << 8 | byte;
  }
  return value;
}

}  // namespace

int exif_orientation(std::string_view exif) {
  while (starts_with(exif, std::string_view("Exif\0\0", 6))) exif.remove_prefix(6);
  if (exif.size() < 8) return 1;
  const bool big_endian = exif[0] == 'M';
  if (exif.substr(0, 2) != (big_endian ? "MM" : "II") || read_uint(exif, 2, 2, big_endian) != 42) return 1;
  const size_t directory = read_uint(exif, 4, 4, big_endian);
  if (directory > exif.size() - 2) return 1;
  const size_t count = read_uint(exif, directory, 2, big_endian);
  for (size_t i = 0; i < count; ++i) {
    const size_t entry = directory + 2 + 12 * i;
    if (entry > exif.size() - 8 || entry + 12 > exif.size()) return 1;
    if (read_uint(exif, entry, 2, big_endian) != 0x0112) continue;
    const uint32_t type = read_uint(exif, entry + 2, 2, big_endian);
    const int width = type == 1 ? 1 : type == 3 ? 2 : type == 4 ? 4 : 0;  // byte, short, long
    if (width == 0 || read_uint(exif, entry + 4, 4, big_endian) == 0) return 1;
    const uint32_t value = read_uint(exif, entry + 8, width, big_endian);
    return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

Image composite_on_white(const std::vector<uint8_t>& rgba, int width, int height) {
  const size_t pixels = static_cast<size_t>(width) * static_cast<size_t>(height);
  PARVL_CHECK(rgba.size() == 4 * pixels, "an RGBA buffer of another size");
  Image out{width, height, std::vector<uint8_t>(3 * pixels)};
  for (size_t i = 0; i < pixels; ++i) {
    const uint32_t alpha = rgba[4 * i + 3];
    for (size_t c = 0; c < 3; ++c) {
      // The quotient by 255 to the nearest, without a division.
      const uint32_t sum = rgba[4 * i + c] * alpha + 255 * (255 - alpha) + 128;
      out.rgb[3 * i + c] = static_cast<uint8_t>((sum + (sum >> 8)) >> 8);
    }
  }
  return out;
}

Image apply_orientation(const Image& image, int orientation) {
  if (orientation <= 1 || orientation > 8) return image;
  const int w = image.width, h = image.height;
  const bool swap = swaps_sides(orientation);
  Image out{swap ? h : w, swap ? w : h, std::vector<uint8_t>(image.rgb.size())};
  // Source column and row of output (x, y): from the left or the right, from the top or the bottom.
  const bool mirror_x = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const bool mirror_y = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  uint8_t* to = out.rgb.data();
  for (int y = 0; y < out.height; ++y) {
    for (int x = 0; x < out.width; ++x) {
      const int column = swap ? y : x, row = swap ? x : y;
      const int from_x = mirror_x ? w - 1 - column : column, from_y = mirror_y ? h - 1 - row : row;
      std::memcpy(
          to, &image.rgb[3 * (static_cast<size_t>(from_y) * static_cast<size_t>(w) + static_cast<size_t>(from_x))], 3);
      to += 3;
    }
  }
  return out;
}

absl::StatusOr<ImageSize> read_image_size(std::string_view bytes, const ImageLimits& limits) {
  PARVL_ASSIGN_OR_RETURN(Format format, detect(bytes, limits));
  PARVL_ASSIGN_OR_RETURN(ImageHeader header, checked_header(format, bytes, limits));
  const int width = static_cast<int>(header.width), height = static_cast<int>(header.height);
  return swaps_sides(header.orientation) ? ImageSize{height, width} : ImageSize{width, height};
}

absl::StatusOr<Image> decode_image(std::string_view bytes, const ImageLimits& limits) {
  PARVL_ASSIGN_OR_RETURN(Format format, detect(bytes, limits));
  PARVL_ASSIGN_OR_RETURN(ImageHeader header, checked_header(format, bytes, limits));
  auto image = format.decode(bytes);
  if (!image.ok()) return with_context(image.status(), absl::StrCat("truncated or corrupt ", format.name));
  if (image->width != header.width || image->height != header.height) {
    return invalid("truncated or corrupt ", format.name, ": its header says ", header.width, "x", header.height,
                   " pixels, its data hold ", image->width, "x", image->height);
  }
  if (header.orientation == 1) return image;
  return apply_orientation(*image, header.orientation);
}

Image dihedral(const Image& image, int index) {
  PARVL_CHECK(index >= 0 && index < 8, "a symmetry of the square outside 0..7");
  // A transposition and k counter-clockwise quarter turns, as the EXIF orientation that does the same at once.
  constexpr int kOrientation[8] = {1, 8, 3, 6, 5, 4, 7, 2};
  return apply_orientation(image, kOrientation[index]);
}

}  // namespace parvl
