// JPEG by libjpeg-turbo. Its errors jump (longjmp), so the functions that set the jump own nothing that needs a
// destructor.
// clang-format off
#include <cstdio>  // jpeglib.h needs it first
#include <jpeglib.h>
#include <jerror.h>
// clang-format on

#include <csetjmp>
#include <cstring>
#include <memory>
#include <string>

#include "parvl/media/image_codec.h"

namespace parvl {
namespace {

constexpr int kMaxScans = 500;  // a progressive file with more is an attack on our time, not a picture

struct Decoder {
  jpeg_error_mgr errors;
  jpeg_progress_mgr progress;
  jpeg_decompress_struct info;
  std::jmp_buf on_error;
  char message[JMSG_LENGTH_MAX] = "";
  bool created = false;
  bool reached_end = false;  // the library ran out of bytes and made up an end marker

  ~Decoder() {
    if (created) jpeg_destroy_decompress(&info);
  }
};

Decoder& decoder_of(j_common_ptr info) { return *static_cast<Decoder*>(info->client_data); }

[[noreturn]] void fail(j_common_ptr info) {
  Decoder& decoder = decoder_of(info);
  (*info->err->format_message)(info, decoder.message);
  std::longjmp(decoder.on_error, 1);
}

// The library goes on after damage and invents pixels; we do not. Harmless oddities pass.
void on_message(j_common_ptr info, int level) {
  if (level >= 0) return;
  switch (info->err->msg_code) {
    case JWRN_EXTRANEOUS_DATA:  // padding that some cameras write
    case JWRN_JFIF_MAJOR:
    case JWRN_ADOBE_XFORM:
    case JWRN_TOO_MUCH_DATA:
      return;
    case JWRN_JPEG_EOF:
      // Harmless when only the end marker is missing; if data are missing too, another warning follows.
      decoder_of(info).reached_end = true;
      return;
    default:
      fail(info);
  }
}

void on_progress(j_common_ptr info) {
  if (!info->is_decompressor) return;
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number > kMaxScans) {
    std::snprintf(decoder_of(info).message, JMSG_LENGTH_MAX, "more than %d scans", kMaxScans);
    std::longjmp(decoder_of(info).on_error, 1);
  }
}

void discard_message(j_common_ptr) {}

// Creates the decoder and reads up to the first scan. False: decoder.message says why.
bool start(Decoder& decoder, std::string_view bytes) {
  std::memset(&decoder.info, 0, sizeof(decoder.info));
  decoder.info.err = jpeg_std_error(&decoder.errors);
  decoder.errors.error_exit = fail;
  decoder.errors.emit_message = on_message;
  decoder.errors.output_message = discard_message;
  decoder.info.client_data = &decoder;
  if (setjmp(decoder.on_error)) return false;
  jpeg_create_decompress(&decoder.info);
  decoder.created = true;
  decoder.info.client_data = &decoder;
  decoder.progress.progress_monitor = on_progress;
  decoder.info.progress = &decoder.progress;
  jpeg_save_markers(&decoder.info, JPEG_APP0 + 1, 0xFFFF);
  jpeg_mem_src(&decoder.info, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  jpeg_read_header(&decoder.info, TRUE);
  return true;
}

bool begin_pixels(Decoder& decoder) {
  if (setjmp(decoder.on_error)) return false;
  jpeg_decompress_struct& info = decoder.info;
  switch (info.num_components) {
    case 1:
      info.out_color_space = JCS_GRAYSCALE;
      break;
    case 3:
      info.out_color_space = JCS_RGB;
      break;
    case 4:
      info.out_color_space = JCS_CMYK;
      break;
    default:
      std::snprintf(decoder.message, JMSG_LENGTH_MAX, "%d colour components", info.num_components);
      return false;
  }
  jpeg_start_decompress(&info);
  return true;
}

// Fills `pixels` (output_components bytes a pixel).
bool read_pixels(Decoder& decoder, uint8_t* pixels) {
  if (setjmp(decoder.on_error)) return false;
  jpeg_decompress_struct& info = decoder.info;
  const size_t stride = static_cast<size_t>(info.output_width) * static_cast<size_t>(info.output_components);
  while (info.output_scanline < info.output_height) {
    JSAMPROW row = pixels + stride * info.output_scanline;
    jpeg_read_scanlines(&info, &row, 1);
  }
  // Without an end marker, a file of several scans may lack scans.
  if (decoder.reached_end && jpeg_has_multiple_scans(&info)) {
    std::snprintf(decoder.message, JMSG_LENGTH_MAX, "the file ends early");
    return false;
  }
  return true;
}

std::string reason(const Decoder& decoder) { return decoder.message; }

uint8_t ink_to_light(uint32_t ink, uint32_t light) {
  const uint32_t product = ink * light + 128;
  return static_cast<uint8_t>(light - ((product + (product >> 8)) >> 8));
}

}  // namespace

absl::StatusOr<ImageHeader> read_jpeg_header(std::string_view bytes) {
  auto decoder = std::make_unique<Decoder>();
  if (!start(*decoder, bytes)) return invalid(reason(*decoder));
  ImageHeader header{decoder->info.image_width, decoder->info.image_height, 1};
  std::string exif;  // may be spread over several markers
  for (auto marker = decoder->info.marker_list; marker != nullptr; marker = marker->next) {
    const std::string_view data(reinterpret_cast<const char*>(marker->data), marker->data_length);
    if (data.substr(0, 6) == std::string_view("Exif\0\0", 6)) exif += data.substr(6);
  }
  header.orientation = exif_orientation(exif);
  return header;
}

absl::StatusOr<Image> decode_jpeg(std::string_view bytes) {
  auto decoder = std::make_unique<Decoder>();
  if (!start(*decoder, bytes) || !begin_pixels(*decoder)) return invalid(reason(*decoder));
  const jpeg_decompress_struct& info = decoder->info;
  const size_t pixels = static_cast<size_t>(info.output_width) * info.output_height;
  const auto channels = static_cast<size_t>(info.output_components);
  std::vector<uint8_t> data(pixels * channels);
  if (!read_pixels(*decoder, data.data())) return invalid(reason(*decoder));
  Image image{static_cast<int>(info.output_width), static_cast<int>(info.output_height), {}};
  if (channels == 3) {
    image.rgb = std::move(data);
    return image;
  }
  image.rgb.resize(3 * pixels);
  for (size_t i = 0; i < pixels; ++i) {
    for (size_t c = 0; c < 3; ++c) {
      // Four-component files hold inverted inks (Adobe's convention, which every writer follows): 255 is no ink.
      image.rgb[3 * i + c] = channels == 1 ? data[i] : ink_to_light(255u - data[4 * i + c], data[4 * i + 3]);
    }
  }
  return image;
}

}  // namespace parvl
