// Limits and refusals of the image readers; their pixels are compared with Pillow's in tests/parity/media_image.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parvl/media/image.h"
#include "parvl/media/image_codec.h"
#include "parvl/media/image_processor.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

Image gradient(int width, int height) {
  Image image{width, height, {}};
  for (int i = 0; i < 3 * width * height; ++i) image.rgb.push_back(static_cast<uint8_t>(i * 7));
  return image;
}

TEST(Image, PngRoundTrip) {
  const Image image = gradient(13, 5);
  const auto back = decode_image(encode_png(image));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->width, 13);
  EXPECT_EQ(back->height, 5);
  EXPECT_EQ(back->rgb, image.rgb);
}

TEST(Image, TheByteLimitIsReached) {
  const std::string png = encode_png(gradient(13, 5));
  ImageLimits limits;
  limits.max_bytes = png.size();
  EXPECT_TRUE(decode_image(png, limits).ok());
  limits.max_bytes = png.size() - 1;
  EXPECT_THAT(decode_image(png, limits).status().message(), HasSubstr("over the limit"));
  EXPECT_FALSE(read_image_size(png, limits).ok());
}

TEST(Image, ThePixelLimitIsReachedBeforeDecoding) {
  std::string png = encode_png(gradient(13, 5));
  ImageLimits limits;
  limits.max_pixels = 65;
  EXPECT_TRUE(decode_image(png, limits).ok());
  limits.max_pixels = 64;
  // The pixels are gone too: were they looked at first, the message would be another.
  const auto status = decode_image(png.substr(0, 60), limits).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("13x5 pixels is over the limit of 64"));
  EXPECT_THAT(read_image_size(png, limits).status().message(), HasSubstr("over the limit of 64"));
}

TEST(Image, ForeignFormatsAreNamed) {
  EXPECT_THAT(decode_image("BM123456").status().message(), HasSubstr("BMP"));
  EXPECT_THAT(decode_image(std::string("\0\0\0\x18"
                                       "ftypheic",
                                       12))
                  .status()
                  .message(),
              HasSubstr("HEIC"));
  EXPECT_THAT(decode_image("<!DOCTYPE html>").status().message(), HasSubstr("web page"));
  EXPECT_THAT(decode_image("").status().message(), HasSubstr("empty"));
}

TEST(Image, ExifOrientationSurvivesDamage) {
  const std::string good("MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0", 26);
  EXPECT_EQ(exif_orientation(good), 6);
  EXPECT_EQ(exif_orientation(std::string("Exif\0\0", 6) + good), 6);
  for (size_t cut = 0; cut < 22; ++cut) EXPECT_EQ(exif_orientation(good.substr(0, cut)), 1) << cut;
  for (const char directory : {'\x09', '\x12', '\x7f', '\xff'}) {
    std::string bad = good;
    bad[7] = directory;
    EXPECT_EQ(exif_orientation(bad), 1);
    bad[4] = bad[5] = '\xff';
    EXPECT_EQ(exif_orientation(bad), 1);
  }
  std::string many = good;  // claims 65,535 entries
  many[8] = many[9] = '\xff';
  many[11] = '\x13';
  EXPECT_EQ(exif_orientation(many), 1);
  std::string nine = good;
  nine[19] = 9;
  EXPECT_EQ(exif_orientation(nine), 1);
}

TEST(Image, DihedralIsAGroupOfEight) {
  const Image image = gradient(4, 3);
  std::vector<std::vector<uint8_t>> seen;
  for (int i = 0; i < 8; ++i) seen.push_back(dihedral(image, i).rgb);
  for (size_t i = 0; i < 8; ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(seen[i], seen[j]);
  }
  Image turned = image;
  for (int i = 0; i < 4; ++i) turned = dihedral(turned, 1);
  EXPECT_EQ(turned.rgb, image.rgb);
  EXPECT_EQ(dihedral(dihedral(image, 4), 4).rgb, image.rgb);
}

TEST(ImageProcessor, KeysDifferWithTheSourceAndWithEverySetting) {
  const ImageProcessorConfig config;
  const auto key = ImageProcessor(config).key_of("bytes");
  EXPECT_EQ(ImageProcessor(config).key_of("bytes"), key);
  EXPECT_NE(ImageProcessor(config).key_of("byte"), key);
  EXPECT_NE(ImageProcessor(config).key_of(""), key);
  const auto differs = [&](auto change) {
    ImageProcessorConfig other;
    change(other);
    return ImageProcessor(other).key_of("bytes") != key;
  };
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { c.patch_size = 16; }));
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { c.temporal_patch_size = 1; }));
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { c.merge_size = 1; }));
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { ++c.min_pixels; }));
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { ++c.max_pixels; }));
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { c.do_resize = false; }));
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { c.do_rescale = false; }));
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { c.do_normalize = false; }));
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { c.rescale_factor = 0.5; }));
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { c.mean[2] = 0.5; }));
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { c.std[0] = 0.5; }));
  EXPECT_TRUE(differs([](ImageProcessorConfig& c) { c.resample = 2; }));
}

TEST(ImageProcessor, TargetSizes) {
  const ImageProcessor processor(ImageProcessorConfig{});
  const auto tiny = processor.target_size(1, 1);
  ASSERT_TRUE(tiny.ok());
  EXPECT_EQ(tiny->width, 56);
  EXPECT_EQ(tiny->height, 56);
  const auto even = processor.target_size(70, 98);  // 2.5 rounds to 2, 3.5 to 4
  EXPECT_EQ(even->width, 56);
  EXPECT_EQ(even->height, 112);
  EXPECT_TRUE(processor.target_size(200, 1).ok());
  EXPECT_THAT(processor.target_size(201, 1).status().message(), HasSubstr("201x1"));
  EXPECT_FALSE(processor.target_size(0, 5).ok());
}

}  // namespace
}  // namespace parvl
