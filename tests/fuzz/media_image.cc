// Image files: whatever the bytes, a picture of the promised size or a good message.
#include <webp/encode.h>

#include "parvl/media/image.h"
#include "parvl/media/image_codec.h"
#include "tests/fuzz/fuzz.h"

namespace {

parvl::Image picture(int width, int height) {
  parvl::Image image{width, height, {}};
  for (int i = 0; i < 3 * width * height; ++i) image.rgb.push_back(static_cast<uint8_t>(i * 37 % 251));
  return image;
}

std::string webp_of(const parvl::Image& image) {
  uint8_t* data = nullptr;
  const size_t size = WebPEncodeLosslessRGB(image.rgb.data(), image.width, image.height, 3 * image.width, &data);
  std::string out(reinterpret_cast<const char*>(data), size);
  WebPFree(data);
  return out;
}

// A baseline JPEG of one grey block, with an orientation; and a two-colour GIF of 2x2 pixels.
std::string jpeg_seed() {
  std::string out(
      "\xff\xd8\xff\xe1\x00\x22"
      "Exif\0\0"
      "MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0",
      38);
  out += std::string("\xff\xdb\x00\x43\x00", 5) + std::string(64, '\x10');
  out += std::string("\xff\xc0\x00\x0b\x08\x00\x08\x00\x08\x01\x01\x11\x00", 13);
  out += std::string("\xff\xc4\x00\x14\x00\x01", 6) + std::string(15, '\0') + '\x03';  // DC: one code, of 3 bits
  out += std::string("\xff\xc4\x00\x14\x10\x01", 6) + std::string(15, '\0') + '\0';    // AC: the end of the block
  return out + std::string("\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\x5f\xff\xd9", 13);
}

std::string gif_seed() {
  return std::string(
      "GIF89a\x02\0\x02\0\x80\0\0\0\0\0\xff\xff\xff\x21\xf9\x04\x01\0\0\x01\0,"
      "\0\0\0\0\x02\0\x02\0\0\x02\x03\x44\x02\x05\0;",
      45);
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  return {parvl::encode_png(picture(5, 3)), webp_of(picture(6, 4)), jpeg_seed(), gif_seed()};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const parvl::ImageLimits limits{.max_bytes = 1 << 16, .max_pixels = 1 << 16};
  const auto header = parvl::read_image_size(bytes, limits);
  const auto image = parvl::decode_image(bytes, limits);
  if (!header.ok()) {
    require_good_message(std::string(header.status().message()));
    FUZZ_REQUIRE(!image.ok());
    return 0;
  }
  if (!image.ok()) {
    require_good_message(std::string(image.status().message()));
    return 0;
  }
  FUZZ_REQUIRE(image->width == header->width && image->height == header->height);
  FUZZ_REQUIRE(image->rgb.size() == 3 * static_cast<size_t>(image->width) * static_cast<size_t>(image->height));
  FUZZ_REQUIRE(int64_t{image->width} * image->height <= limits.max_pixels);
  parvl::exif_orientation(bytes);
  return 0;
}
