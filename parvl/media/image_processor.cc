#include "parvl/media/image_processor.h"

#include <array>
#include <cmath>

#include "parvl/base/check.h"
#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/media/unicode.h"

namespace parvl {
namespace {

constexpr int64_t kMaxPixelsLimit = int64_t{1} << 32;  // keeps every product below in range

// Three numbers, or one for all channels.
absl::Status read_channels(const Json& config, const std::string& key, std::vector<double>& values) {
  auto it = config.find(key);
  if (it == config.end() || it->is_null()) return absl::OkStatus();
  if (it->is_number()) {
    values.assign(3, it->get<double>());
    return absl::OkStatus();
  }
  if (!it->is_array() || it->size() != 3) return invalid("'", key, "' must be a number or a list of 3 numbers");
  values.clear();
  for (const Json& value : *it) {
    if (!value.is_number()) return invalid("'", key, "' must be a number or a list of 3 numbers");
    values.push_back(value.get<double>());
  }
  return absl::OkStatus();
}

absl::Status read_int(const Json& config, const std::string& key, int max, int& value) {
  PARVL_ASSIGN_OR_RETURN(int64_t wide, json_value<int64_t>(config, key, value));
  if (wide < 1 || wide > max) return invalid("'", key, "' must be from 1 to ", max, ", found ", wide);
  value = static_cast<int>(wide);
  return absl::OkStatus();
}

// The two spellings of the pixel range: min_pixels / max_pixels win over `size`, whose keys have two names as well.
absl::Status read_pixel_range(const Json& config, ImageProcessorConfig& out) {
  if (auto size = config.find("size"); size != config.end() && !size->is_null()) {
    if (!size->is_object()) return invalid("'size' must be an object with 'shortest_edge' and 'longest_edge'");
    for (const auto& [key, ignored] : size->items()) {
      if (key != "shortest_edge" && key != "longest_edge" && key != "min_pixels" && key != "max_pixels") {
        return invalid("'size' has the key '", one_line(key, 80),
                       "'; 'shortest_edge' and 'longest_edge' (in pixels) are known");
      }
    }
    PARVL_ASSIGN_OR_RETURN(out.min_pixels, json_value<int64_t>(*size, "min_pixels", out.min_pixels));
    PARVL_ASSIGN_OR_RETURN(out.max_pixels, json_value<int64_t>(*size, "max_pixels", out.max_pixels));
    PARVL_ASSIGN_OR_RETURN(out.min_pixels, json_value<int64_t>(*size, "shortest_edge", out.min_pixels));
    PARVL_ASSIGN_OR_RETURN(out.max_pixels, json_value<int64_t>(*size, "longest_edge", out.max_pixels));
  }
  PARVL_ASSIGN_OR_RETURN(out.min_pixels, json_value<int64_t>(config, "min_pixels", out.min_pixels));
  PARVL_ASSIGN_OR_RETURN(out.max_pixels, json_value<int64_t>(config, "max_pixels", out.max_pixels));
  if (out.min_pixels < 1 || out.max_pixels > kMaxPixelsLimit || out.min_pixels > out.max_pixels) {
    return invalid("the pixel range must be 1 <= min_pixels <= max_pixels <= ", kMaxPixelsLimit, ", found ",
                   out.min_pixels, " and ", out.max_pixels);
  }
  return absl::OkStatus();
}

absl::Status check_type(const Json& config) {
  PARVL_ASSIGN_OR_RETURN(std::string type, json_value<std::string>(config, "image_processor_type", ""));
  constexpr std::array kKnown = {"", "Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil",
                                 "Qwen2_5_VLImageProcessor"};
  for (const char* known : kKnown) {
    if (type == known) return absl::OkStatus();
  }
  return invalid("image_processor_type '", one_line(type, 80), "' is not known; the Qwen2-VL family's is");
}

absl::StatusOr<ImageProcessorConfig> read_config(const Json& config) {
  if (!config.is_object()) return invalid("it must be a JSON object");
  PARVL_RETURN_IF_ERROR(check_type(config));
  ImageProcessorConfig out;
  PARVL_RETURN_IF_ERROR(read_int(config, "patch_size", 1024, out.patch_size));
  PARVL_RETURN_IF_ERROR(read_int(config, "temporal_patch_size", 16, out.temporal_patch_size));
  PARVL_RETURN_IF_ERROR(read_int(config, "merge_size", 16, out.merge_size));
  PARVL_RETURN_IF_ERROR(read_pixel_range(config, out));
  PARVL_ASSIGN_OR_RETURN(out.do_resize, json_value<bool>(config, "do_resize", out.do_resize));
  PARVL_ASSIGN_OR_RETURN(out.do_rescale, json_value<bool>(config, "do_rescale", out.do_rescale));
  PARVL_ASSIGN_OR_RETURN(out.do_normalize, json_value<bool>(config, "do_normalize", out.do_normalize));
  PARVL_ASSIGN_OR_RETURN(out.rescale_factor, json_value<double>(config, "rescale_factor", out.rescale_factor));
  PARVL_RETURN_IF_ERROR(read_channels(config, "image_mean", out.mean));
  PARVL_RETURN_IF_ERROR(read_channels(config, "image_std", out.std));
  for (const double deviation : out.std) {
    if (static_cast<float>(deviation) == 0.0f) return invalid("'image_std' must not be 0");
  }
  PARVL_RETURN_IF_ERROR(read_int(config, "resample", 3, out.resample));
  return out;
}

// Rounds half to even, as Python does.
int64_t round_to_multiple(int64_t side, int64_t factor) {
  return static_cast<int64_t>(std::nearbyint(static_cast<double>(side) / static_cast<double>(factor))) * factor;
}

// What each of the 256 byte values becomes in one channel; the same roundings, in the same order, as the reference:
// scaled in double and rounded to float, then shifted and divided in float.
std::array<float, 256> value_table(const ImageProcessorConfig& config, size_t channel) {
  std::array<float, 256> table{};
  for (size_t v = 0; v < 256; ++v) {
    float value = static_cast<float>(v);
    if (config.do_rescale) value = static_cast<float>(static_cast<double>(v) * config.rescale_factor);
    if (config.do_normalize) {
      const float shifted = value - static_cast<float>(config.mean[channel]);
      value = shifted / static_cast<float>(config.std[channel]);
    }
    table[v] = value;
  }
  return table;
}

// One patch: [channel][temporal copies][patch][patch]; returns the position after it.
float* write_patch(const ImageProcessorConfig& config, const std::array<std::array<float, 256>, 3>& tables,
                   const uint8_t* corner, size_t row_bytes, float* to) {
  const auto patch = static_cast<size_t>(config.patch_size);
  for (size_t c = 0; c < 3; ++c) {
    const float* first = to;
    for (size_t y = 0; y < patch; ++y) {
      const uint8_t* from = corner + y * row_bytes + c;
      for (size_t x = 0; x < patch; ++x) *to++ = tables[c][from[3 * x]];
    }
    for (int t = 1; t < config.temporal_patch_size; ++t) to = std::copy(first, first + patch * patch, to);
  }
  return to;
}

}  // namespace

absl::StatusOr<ImageProcessor> ImageProcessor::load(const std::string& dir) {
  std::string path = dir + "/preprocessor_config.json";
  auto json = read_json_file(path);
  if (absl::IsNotFound(json.status())) {
    // Newer writers put the processors of all modalities in one file.
    auto whole = read_json_file(dir + "/processor_config.json");
    if (absl::IsNotFound(whole.status())) return json.status();
    PARVL_RETURN_IF_ERROR(whole.status());
    path = dir + "/processor_config.json";
    if (!whole->is_object() || !whole->contains("image_processor")) {
      return absl::NotFoundError(
          absl::StrCat(path, " has no 'image_processor', and there is no preprocessor_config.json"));
    }
    json = (*whole)["image_processor"];
  }
  PARVL_RETURN_IF_ERROR(json.status());
  auto config = read_config(*json);
  if (!config.ok()) return with_context(config.status(), path);
  return ImageProcessor(*std::move(config));
}

absl::StatusOr<ImageSize> ImageProcessor::target_size(int width, int height) const {
  if (width <= 0 || height <= 0) return invalid("an image of ", width, "x", height, " pixels is empty");
  const int64_t factor = int64_t{config_.patch_size} * config_.merge_size;
  if (!config_.do_resize) {
    if (width % factor == 0 && height % factor == 0) return ImageSize{width, height};
    return invalid("an image of ", width, "x", height, " pixels does not divide into squares of ", factor,
                   " pixels, and the processor's configuration does not resize");
  }
  const int64_t w = width, h = height;
  if (static_cast<double>(std::max(w, h)) / static_cast<double>(std::min(w, h)) > 200) {
    return invalid("an image of ", width, "x", height,
                   " pixels is refused: its longer side is more than 200 times the shorter");
  }
  const double area = static_cast<double>(h * w), side = static_cast<double>(factor);
  int64_t target_h = round_to_multiple(h, factor), target_w = round_to_multiple(w, factor);
  const auto scaled_down = [&](int64_t length, double beta) {
    return std::max(factor, static_cast<int64_t>(std::floor(static_cast<double>(length) / beta / side)) * factor);
  };
  const auto scaled_up = [&](int64_t length, double beta) {
    return static_cast<int64_t>(std::ceil(static_cast<double>(length) * beta / side)) * factor;
  };
  if (target_h * target_w > config_.max_pixels) {
    const double beta = std::sqrt(area / static_cast<double>(config_.max_pixels));
    target_h = scaled_down(h, beta);
    target_w = scaled_down(w, beta);
  } else if (target_h * target_w < config_.min_pixels) {
    const double beta = std::sqrt(static_cast<double>(config_.min_pixels) / area);
    target_h = scaled_up(h, beta);
    target_w = scaled_up(w, beta);
  }
  return ImageSize{static_cast<int>(target_w), static_cast<int>(target_h)};
}

absl::StatusOr<ProcessedImage> ImageProcessor::outline(const ImageSize& size) const {
  PARVL_ASSIGN_OR_RETURN(const ImageSize target, target_size(size.width, size.height));
  ProcessedImage out;
  out.grid_t = 1;
  out.grid_h = target.height / config_.patch_size;
  out.grid_w = target.width / config_.patch_size;
  out.merge_size = config_.merge_size;
  out.patch_floats = 3 * config_.temporal_patch_size * config_.patch_size * config_.patch_size;
  return out;
}

absl::Status ImageProcessor::fill(const Image& image, absl::Span<float> patches) const {
  PARVL_ASSIGN_OR_RETURN(const ImageSize size, target_size(image.width, image.height));
  PARVL_ASSIGN_OR_RETURN(const ProcessedImage shape, outline({image.width, image.height}));
  PARVL_CHECK(static_cast<int64_t>(patches.size()) == shape.num_values(), "patches of another image's size");
  const bool resizes = size.width != image.width || size.height != image.height;
  Image resized;
  if (resizes) resized = resize_like_pil(image, size.width, size.height, config_.resample);
  const Image& from = resizes ? resized : image;
  const std::array tables = {value_table(config_, 0), value_table(config_, 1), value_table(config_, 2)};
  const auto patch = static_cast<size_t>(config_.patch_size), merge = static_cast<size_t>(config_.merge_size);
  const size_t row_bytes = 3 * static_cast<size_t>(from.width);
  float* to = patches.data();
  for (size_t by = 0; by < static_cast<size_t>(shape.grid_h); by += merge) {
    for (size_t bx = 0; bx < static_cast<size_t>(shape.grid_w); bx += merge) {
      for (size_t y = by; y < by + merge; ++y) {
        for (size_t x = bx; x < bx + merge; ++x) {
          to = write_patch(config_, tables, &from.rgb[y * patch * row_bytes + 3 * x * patch], row_bytes, to);
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ProcessedImage> ImageProcessor::process(const Image& image) const {
  PARVL_ASSIGN_OR_RETURN(ProcessedImage out, outline({image.width, image.height}));
  out.patches.resize(static_cast<size_t>(out.num_values()));
  PARVL_RETURN_IF_ERROR(fill(image, absl::MakeSpan(out.patches)));
  return out;
}

std::array<uint8_t, 32> ImageProcessor::key_of(std::string_view source) const {
  constexpr int kVersion = 1;  // goes up when `process` or the decoders give other patches for the same file
  const ImageProcessorConfig& c = config_;
  const Json settings = {kVersion,    c.patch_size, c.temporal_patch_size, c.merge_size,     c.min_pixels, c.max_pixels,
                         c.do_resize, c.do_rescale, c.do_normalize,        c.rescale_factor, c.mean,       c.std,
                         c.resample};
  return sha256(sha256_hex(source) + settings.dump());
}

}  // namespace parvl
