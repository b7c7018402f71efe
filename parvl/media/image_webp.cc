// WebP by libwebp; of an animation the first frame.
#include <webp/decode.h>
#include <webp/demux.h>

#include <memory>

#include "parvl/media/image_codec.h"

namespace parvl {
namespace {

const uint8_t* data_of(std::string_view bytes) { return reinterpret_cast<const uint8_t*>(bytes.data()); }

const char* reason(VP8StatusCode code) {
  switch (code) {
    case VP8_STATUS_OUT_OF_MEMORY:
      return "out of memory";
    case VP8_STATUS_NOT_ENOUGH_DATA:
      return "the file ends early";
    case VP8_STATUS_UNSUPPORTED_FEATURE:
      return "it uses a feature that libwebp does not know";
    default:
      return "its data make no sense";
  }
}

absl::StatusOr<WebPBitstreamFeatures> features_of(std::string_view bytes) {
  WebPBitstreamFeatures features;
  const VP8StatusCode code = WebPGetFeatures(data_of(bytes), bytes.size(), &features);
  if (code != VP8_STATUS_OK) return invalid(reason(code));
  return features;
}

using Demuxer = std::unique_ptr<WebPDemuxer, decltype(&WebPDemuxDelete)>;

absl::StatusOr<Demuxer> demux(std::string_view bytes) {
  const WebPData data{data_of(bytes), bytes.size()};
  Demuxer demuxer(WebPDemux(&data), WebPDemuxDelete);
  if (demuxer == nullptr) return invalid("its chunks are incomplete");
  return demuxer;
}

absl::StatusOr<Image> decode_first_frame(std::string_view bytes) {
  WebPAnimDecoderOptions options;
  if (!WebPAnimDecoderOptionsInit(&options)) return failed("libwebp has another version than its headers");
  options.color_mode = MODE_RGBA;
  const WebPData data{data_of(bytes), bytes.size()};
  std::unique_ptr<WebPAnimDecoder, decltype(&WebPAnimDecoderDelete)> decoder(WebPAnimDecoderNew(&data, &options),
                                                                             WebPAnimDecoderDelete);
  WebPAnimInfo info;
  uint8_t* pixels = nullptr;
  int timestamp_ms = 0;
  if (decoder == nullptr || !WebPAnimDecoderGetInfo(decoder.get(), &info) ||
      !WebPAnimDecoderGetNext(decoder.get(), &pixels, &timestamp_ms)) {
    return invalid("its first frame cannot be decoded");
  }
  const size_t count = size_t{4} * info.canvas_width * info.canvas_height;
  return composite_on_white({pixels, pixels + count}, static_cast<int>(info.canvas_width),
                            static_cast<int>(info.canvas_height));
}

}  // namespace

absl::StatusOr<ImageHeader> read_webp_header(std::string_view bytes) {
  PARVL_ASSIGN_OR_RETURN(WebPBitstreamFeatures features, features_of(bytes));
  PARVL_ASSIGN_OR_RETURN(Demuxer demuxer, demux(bytes));
  ImageHeader header{features.width, features.height, 1};
  WebPChunkIterator chunk;
  if (WebPDemuxGetChunk(demuxer.get(), "EXIF", 1, &chunk)) {
    header.orientation = exif_orientation({reinterpret_cast<const char*>(chunk.chunk.bytes), chunk.chunk.size});
    WebPDemuxReleaseChunkIterator(&chunk);
  }
  return header;
}

absl::StatusOr<Image> decode_webp(std::string_view bytes) {
  PARVL_ASSIGN_OR_RETURN(WebPBitstreamFeatures features, features_of(bytes));
  if (features.has_animation) return decode_first_frame(bytes);
  const size_t pixels = static_cast<size_t>(features.width) * static_cast<size_t>(features.height);
  const size_t channels = features.has_alpha ? 4 : 3;
  std::vector<uint8_t> data(pixels * channels);
  const int stride = features.width * static_cast<int>(channels);
  const auto decode = features.has_alpha ? WebPDecodeRGBAInto : WebPDecodeRGBInto;
  if (decode(data_of(bytes), bytes.size(), data.data(), data.size(), stride) == nullptr) {
    return invalid("its data end early or make no sense");
  }
  if (features.has_alpha) return composite_on_white(data, features.width, features.height);
  return Image{features.width, features.height, std::move(data)};
}

}  // namespace parvl
