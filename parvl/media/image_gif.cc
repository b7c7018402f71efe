// The first frame of a GIF, by giflib's sequential reader (it reserves nothing by what a header claims).
#include <gif_lib.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "parvl/media/image_codec.h"

namespace parvl {
namespace {

int read_bytes(GifFileType* gif, GifByteType* to, int count) {
  auto* rest = static_cast<std::string_view*>(gif->UserData);
  const size_t given = std::min(rest->size(), static_cast<size_t>(std::max(count, 0)));
  std::memcpy(to, rest->data(), given);
  rest->remove_prefix(given);
  return static_cast<int>(given);
}

struct Closer {
  void operator()(GifFileType* gif) const {
    int error = 0;
    DGifCloseFile(gif, &error);
  }
};

std::string reason(int error) {
  const char* text = GifErrorString(error);
  return text == nullptr ? "its data make no sense" : text;
}

// A reader that stands at the first frame's pixels.
struct FirstFrame {
  std::string_view rest;
  std::unique_ptr<GifFileType, Closer> gif;
  int transparent = NO_TRANSPARENT_COLOR;
  // The canvas: the logical screen, grown where the frame sticks out.
  int width = 0;
  int height = 0;
};

absl::Status read_extension(FirstFrame& frame) {
  int code = 0;
  GifByteType* block = nullptr;  // a length byte, then the data
  if (DGifGetExtension(frame.gif.get(), &code, &block) == GIF_ERROR) return invalid(reason(frame.gif->Error));
  while (block != nullptr) {
    GraphicsControlBlock control;
    if (code == GRAPHICS_EXT_FUNC_CODE && DGifExtensionToGCB(block[0], block + 1, &control) == GIF_OK) {
      frame.transparent = control.TransparentColor;
    }
    if (DGifGetExtensionNext(frame.gif.get(), &block) == GIF_ERROR) return invalid(reason(frame.gif->Error));
  }
  return absl::OkStatus();
}

// `frame` must stay where it is: the reader points into it.
absl::Status open(FirstFrame& frame, std::string_view bytes) {
  frame.rest = bytes;
  int error = 0;
  frame.gif.reset(DGifOpen(&frame.rest, read_bytes, &error));
  if (frame.gif == nullptr) return invalid(reason(error));
  GifRecordType type = UNDEFINED_RECORD_TYPE;
  for (;;) {
    if (DGifGetRecordType(frame.gif.get(), &type) == GIF_ERROR) return invalid(reason(frame.gif->Error));
    if (type == IMAGE_DESC_RECORD_TYPE) break;
    if (type == TERMINATE_RECORD_TYPE) return invalid("it holds no frame");
    if (type == EXTENSION_RECORD_TYPE) PARVL_RETURN_IF_ERROR(read_extension(frame));
  }
  if (DGifGetImageDesc(frame.gif.get()) == GIF_ERROR) return invalid(reason(frame.gif->Error));
  const GifImageDesc& desc = frame.gif->Image;
  if (desc.Width <= 0 || desc.Height <= 0) return invalid("its first frame is empty");
  frame.width = std::max(frame.gif->SWidth, desc.Left + desc.Width);
  frame.height = std::max(frame.gif->SHeight, desc.Top + desc.Height);
  return absl::OkStatus();
}

// The order in which the file gives the rows.
std::vector<int> row_order(int height, bool interlaced) {
  std::vector<int> order;
  order.reserve(static_cast<size_t>(height));
  constexpr int kFirst[4] = {0, 4, 2, 1}, kStep[4] = {8, 8, 4, 2};
  for (int pass = 0; pass < (interlaced ? 4 : 1); ++pass) {
    for (int y = interlaced ? kFirst[pass] : 0; y < height; y += interlaced ? kStep[pass] : 1) order.push_back(y);
  }
  return order;
}

void put_color(const ColorMapObject* colors, int index, bool transparent, uint8_t* to) {
  if (transparent) {
    std::memset(to, 255, 3);
  } else if (colors == nullptr) {
    std::memset(to, index, 3);  // no palette: the index is a grey level
  } else if (index < colors->ColorCount) {
    const GifColorType& color = colors->Colors[index];
    to[0] = color.Red, to[1] = color.Green, to[2] = color.Blue;
  } else {
    std::memset(to, 0, 3);
  }
}

}  // namespace

absl::StatusOr<ImageHeader> read_gif_header(std::string_view bytes) {
  FirstFrame frame;
  PARVL_RETURN_IF_ERROR(open(frame, bytes));
  return ImageHeader{frame.width, frame.height, 1};
}

absl::StatusOr<Image> decode_gif(std::string_view bytes) {
  FirstFrame frame;
  PARVL_RETURN_IF_ERROR(open(frame, bytes));
  const GifImageDesc& desc = frame.gif->Image;
  const ColorMapObject* colors = desc.ColorMap != nullptr ? desc.ColorMap : frame.gif->SColorMap;
  const auto width = static_cast<size_t>(frame.width), height = static_cast<size_t>(frame.height);
  Image image{frame.width, frame.height, std::vector<uint8_t>(3 * width * height)};
  uint8_t outside[3];  // what the frame does not cover
  put_color(colors, 0, frame.transparent != NO_TRANSPARENT_COLOR, outside);
  for (size_t i = 0; i < width * height; ++i) std::memcpy(&image.rgb[3 * i], outside, 3);
  std::vector<GifPixelType> line(static_cast<size_t>(desc.Width));
  for (const int y : row_order(desc.Height, desc.Interlace)) {
    if (DGifGetLine(frame.gif.get(), line.data(), desc.Width) == GIF_ERROR) return invalid(reason(frame.gif->Error));
    uint8_t* to = &image.rgb[3 * (static_cast<size_t>(desc.Top + y) * width + static_cast<size_t>(desc.Left))];
    for (const GifPixelType index : line) {
      put_color(colors, index, index == frame.transparent, to);
      to += 3;
    }
  }
  return image;
}

}  // namespace parvl
