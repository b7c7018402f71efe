// PNG by libpng. Its errors jump (longjmp), so the functions that set the jump own nothing that needs a destructor.
#include <png.h>

#include <csetjmp>
#include <cstring>
#include <memory>
#include <string>

#include "parvl/base/check.h"
#include "parvl/media/image_codec.h"

namespace parvl {
namespace {

struct Source {
  std::string_view rest;
  std::string message;
};

[[noreturn]] void on_error(png_structp png, png_const_charp message) {
  static_cast<Source*>(png_get_error_ptr(png))->message = message;
  png_longjmp(png, 1);
}

void on_warning(png_structp, png_const_charp) {}

void read_bytes(png_structp png, png_bytep to, size_t count) {
  auto* source = static_cast<Source*>(png_get_io_ptr(png));
  if (count > source->rest.size()) png_error(png, "the file ends early");
  std::memcpy(to, source->rest.data(), count);
  source->rest.remove_prefix(count);
}

// A libpng reader and what it holds; always whole or null.
struct Reader {
  png_structp png = nullptr;
  png_infop info = nullptr;
  ~Reader() { png_destroy_read_struct(&png, &info, nullptr); }
};

// Reads up to the pixels and asks for 8 bits, RGB or RGBA. False: the source's message says why.
bool begin(Reader& reader, Source& source) {
  if (setjmp(png_jmpbuf(reader.png))) return false;
  png_set_read_fn(reader.png, &source, read_bytes);
  // Of the ancillary chunks only tRNS matters; the others (compressed texts, profiles) are not even unpacked.
  png_set_keep_unknown_chunks(reader.png, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
  png_read_info(reader.png, reader.info);
  png_set_strip_16(reader.png);
  png_set_expand(reader.png);  // palette → RGB, 1/2/4 bits → 8, tRNS → alpha
  png_set_gray_to_rgb(reader.png);
  png_set_interlace_handling(reader.png);
  png_read_update_info(reader.png, reader.info);
  return true;
}

// `rows` point at the image's rows. Reads to the file's end, so that a cut anywhere is seen.
bool read_rows(Reader& reader, png_bytepp rows) {
  if (setjmp(png_jmpbuf(reader.png))) return false;
  png_read_image(reader.png, rows);
  png_read_end(reader.png, nullptr);
  return true;
}

uint32_t big_endian(std::string_view bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
  return value;
}

}  // namespace

absl::StatusOr<ImageHeader> read_png_header(std::string_view bytes) {
  size_t at = 8;  // after the signature
  ImageHeader header;
  while (bytes.size() >= at + 12) {
    const size_t length = big_endian(bytes, at);
    const std::string_view type = bytes.substr(at + 4, 4);
    if (length > bytes.size() - at - 12) break;
    const std::string_view data = bytes.substr(at + 8, length);
    if (at == 8) {
      if (type != "IHDR" || length != 13) return invalid("it does not start with an IHDR chunk");
      header.width = big_endian(data, 0);
      header.height = big_endian(data, 4);
    } else if (type == "eXIf") {  // it may follow the pixels
      header.orientation = exif_orientation(data);
    } else if (type == "IEND") {
      break;
    }
    at += 12 + length;
  }
  if (at == 8) return invalid("the file ends early");
  return header;
}

absl::StatusOr<Image> decode_png(std::string_view bytes) {
  Source source{bytes, {}};
  Reader reader;
  reader.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &source, on_error, on_warning);
  if (reader.png != nullptr) reader.info = png_create_info_struct(reader.png);
  if (reader.info == nullptr) return failed("libpng could not start: out of memory");
  if (!begin(reader, source)) return invalid(source.message);
  const int width = static_cast<int>(png_get_image_width(reader.png, reader.info));
  const int height = static_cast<int>(png_get_image_height(reader.png, reader.info));
  const int channels = png_get_channels(reader.png, reader.info);
  const size_t stride = png_get_rowbytes(reader.png, reader.info);
  PARVL_CHECK(stride == static_cast<size_t>(width) * static_cast<size_t>(channels) && (channels == 3 || channels == 4),
              "libpng gives a row layout that was not asked for");
  std::vector<uint8_t> pixels(stride * static_cast<size_t>(height));
  std::vector<png_bytep> rows(static_cast<size_t>(height));
  for (size_t y = 0; y < rows.size(); ++y) rows[y] = pixels.data() + y * stride;
  if (!read_rows(reader, rows.data())) return invalid(source.message);
  if (channels == 4) return composite_on_white(pixels, width, height);
  return Image{width, height, std::move(pixels)};
}

std::string encode_png(const Image& image) {
  PARVL_CHECK(image.rgb.size() == 3 * static_cast<size_t>(image.width) * static_cast<size_t>(image.height),
              "an image whose pixels do not fit its sides");
  png_image out;
  std::memset(&out, 0, sizeof(out));
  out.version = PNG_IMAGE_VERSION;
  out.width = static_cast<png_uint_32>(image.width);
  out.height = static_cast<png_uint_32>(image.height);
  out.format = PNG_FORMAT_RGB;
  png_alloc_size_t size = 0;
  PARVL_CHECK(png_image_write_get_memory_size(out, size, 0, image.rgb.data(), 0, nullptr), out.message);
  std::string bytes(size, '\0');
  PARVL_CHECK(png_image_write_to_memory(&out, bytes.data(), &size, 0, image.rgb.data(), 0, nullptr), out.message);
  bytes.resize(size);
  return bytes;
}

}  // namespace parvl
