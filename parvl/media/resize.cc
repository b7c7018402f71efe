// PIL's antialiased resize, to the bit: two separable passes, coefficients in 22-bit fixed point, 8 bits between the
// passes.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "parvl/base/check.h"
#include "parvl/media/image_processor.h"

namespace parvl {
namespace {

constexpr int kPrecisionBits = 32 - 8 - 2;

double triangle(double x) {
  x = std::fabs(x);
  return x < 1.0 ? 1.0 - x : 0.0;
}

double cubic(double x) {
  constexpr double kA = -0.5;
  x = std::fabs(x);
  if (x < 1.0) return ((kA + 2.0) * x - (kA + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * kA;
  return 0.0;
}

double sinc(double x) {
  if (x == 0.0) return 1.0;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}

double lanczos3(double x) { return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

struct Filter {
  double (*weight)(double);
  double support;
};

Filter filter_of(int resample) {
  switch (resample) {
    case 1:
      return {lanczos3, 3.0};
    case 2:
      return {triangle, 1.0};
    case 3:
      return {cubic, 2.0};
    default:
      PARVL_CHECK(false, "a resampling filter other than 1 (Lanczos), 2 (bilinear), 3 (bicubic)");
      return {nullptr, 0.0};
  }
}

// For each output position, the run of input positions that it sums and their weights.
struct Taps {
  int longest = 0;
  std::vector<int> first, count;
  std::vector<int32_t> weights;  // `longest` an output position
};

Taps make_taps(int in_size, int out_size, const Filter& filter) {
  const double scale = static_cast<double>(in_size) / out_size;
  const double stretch = std::max(scale, 1.0);
  const double support = filter.support * stretch;
  Taps taps;
  taps.longest = static_cast<int>(std::ceil(support)) * 2 + 1;
  const auto outputs = static_cast<size_t>(out_size);
  taps.first.resize(outputs);
  taps.count.resize(outputs);
  taps.weights.assign(outputs * static_cast<size_t>(taps.longest), 0);
  std::vector<double> exact(static_cast<size_t>(taps.longest));
  for (size_t o = 0; o < outputs; ++o) {
    const double center = (static_cast<double>(o) + 0.5) * scale;
    const int first = std::max(static_cast<int>(center - support + 0.5), 0);
    const int count = std::min(static_cast<int>(center + support + 0.5), in_size) - first;
    double sum = 0.0;
    for (int i = 0; i < count; ++i) {
      exact[static_cast<size_t>(i)] = filter.weight((i + first - center + 0.5) * (1.0 / stretch));
      sum += exact[static_cast<size_t>(i)];
    }
    int32_t* weights = &taps.weights[o * static_cast<size_t>(taps.longest)];
    for (int i = 0; i < count; ++i) {
      double weight = exact[static_cast<size_t>(i)];
      if (sum != 0.0) weight /= sum;
      weights[i] = static_cast<int32_t>((weight < 0 ? -0.5 : 0.5) + weight * (1 << kPrecisionBits));
    }
    taps.first[o] = first;
    taps.count[o] = count;
  }
  return taps;
}

uint8_t to_byte(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kPrecisionBits, 0, 255)); }

Image resize_rows(const Image& in, int width, const Filter& filter) {
  const Taps taps = make_taps(in.width, width, filter);
  Image out{width, in.height, std::vector<uint8_t>(3 * static_cast<size_t>(width) * static_cast<size_t>(in.height))};
  uint8_t* to = out.rgb.data();
  for (int y = 0; y < in.height; ++y) {
    const uint8_t* row = &in.rgb[3 * static_cast<size_t>(y) * static_cast<size_t>(in.width)];
    for (size_t x = 0; x < static_cast<size_t>(width); ++x) {
      const uint8_t* from = row + 3 * taps.first[x];
      const int32_t* weights = &taps.weights[x * static_cast<size_t>(taps.longest)];
      int32_t r = 1 << (kPrecisionBits - 1), g = r, b = r;
      for (int i = 0; i < taps.count[x]; ++i) {
        r += from[3 * i] * weights[i];
        g += from[3 * i + 1] * weights[i];
        b += from[3 * i + 2] * weights[i];
      }
      *to++ = to_byte(r), *to++ = to_byte(g), *to++ = to_byte(b);
    }
  }
  return out;
}

Image resize_columns(const Image& in, int height, const Filter& filter) {
  const Taps taps = make_taps(in.height, height, filter);
  const size_t stride = 3 * static_cast<size_t>(in.width);
  Image out{in.width, height, std::vector<uint8_t>(stride * static_cast<size_t>(height))};
  std::vector<int32_t> sums(stride);
  for (size_t y = 0; y < static_cast<size_t>(height); ++y) {
    std::fill(sums.begin(), sums.end(), 1 << (kPrecisionBits - 1));
    for (int i = 0; i < taps.count[y]; ++i) {
      const uint8_t* row = &in.rgb[stride * static_cast<size_t>(taps.first[y] + i)];
      const int32_t weight = taps.weights[y * static_cast<size_t>(taps.longest) + static_cast<size_t>(i)];
      for (size_t x = 0; x < stride; ++x) sums[x] += row[x] * weight;
    }
    uint8_t* to = &out.rgb[stride * y];
    for (size_t x = 0; x < stride; ++x) to[x] = to_byte(sums[x]);
  }
  return out;
}

}  // namespace

Image resize_like_pil(const Image& image, int width, int height, int resample) {
  PARVL_CHECK(width > 0 && height > 0 && image.width > 0 && image.height > 0, "a resize from or to an empty image");
  const Filter filter = filter_of(resample);
  const bool rows_change = width != image.width, columns_change = height != image.height;
  if (!rows_change && !columns_change) return image;
  if (!rows_change) return resize_columns(image, height, filter);
  if (!columns_change) return resize_rows(image, width, filter);
  // The order shows in the last bit, since each pass rounds. Pillow 13 starts with the columns when the height shrinks
  // by more than twice what the width does; earlier releases never do.
  const int64_t shorter = int64_t{image.height} - height, narrower = int64_t{image.width} - width;
  if (shorter > 0 && shorter > 2 * narrower) return resize_rows(resize_columns(image, height, filter), width, filter);
  return resize_columns(resize_rows(image, width, filter), height, filter);
}

}  // namespace parvl
