#include "parvl/serve/load_content.h"

#include <absl/strings/escaping.h>
#include <absl/strings/str_cat.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "parvl/base/json.h"
#include "parvl/base/rng.h"

namespace parvl {
namespace {

constexpr int kSquare = 16;  // pixels

// Streams of the seed: the kind above, the number below.
constexpr uint64_t kTextStream = uint64_t{1} << 48;
constexpr uint64_t kImageStream = uint64_t{2} << 48;
constexpr uint64_t kRepeatStream = uint64_t{3} << 48;

constexpr std::array<std::string_view, kLoadVocabulary> kWords = {
    "river", "stone",  "light", "window", "garden", "paper",  "winter", "color", "table", "music", "road",
    "north", "silver", "cloud", "animal", "bridge", "small",  "people", "open",  "water", "green", "city",
    "glass", "field",  "early", "number", "round",  "spring", "letter", "seven", "board", "quiet"};

std::string image_part(const std::string& png) {
  return absl::StrCat(R"({"type":"image_url","image_url":{"url":"data:image/png;base64,)", absl::Base64Escape(png),
                      R"("}})");
}

}  // namespace

std::string load_text(uint64_t seed, uint64_t index, int64_t words) {
  Rng rng(seed, kTextStream + index);
  std::array<std::string_view, kLoadVocabulary> order = kWords;
  std::string text;
  for (int64_t i = 0; i < words; ++i) {
    const size_t place = static_cast<size_t>(i % kLoadVocabulary);
    std::swap(order[place], order[place + rng.below(order.size() - place)]);
    if (i > 0) text += ' ';
    text += order[place];
  }
  return text;
}

Image load_image(uint64_t seed, uint64_t number, ImageSize size) {
  Rng rng(seed, kImageStream + number);
  Image image{size.width, size.height, {}};
  image.rgb.reserve(3 * static_cast<size_t>(size.width) * static_cast<size_t>(size.height));
  std::vector<uint32_t> colors(static_cast<size_t>((size.width + kSquare - 1) / kSquare));
  for (int y = 0; y < size.height; ++y) {
    if (y % kSquare == 0) {
      for (uint32_t& color : colors) color = static_cast<uint32_t>(rng.next());
    }
    if (y == 0) colors[0] = static_cast<uint32_t>(number);  // so that no two are equal, however small
    for (int x = 0; x < size.width; ++x) {
      const uint32_t color = colors[static_cast<size_t>(x / kSquare)];
      for (int shift = 0; shift < 24; shift += 8) image.rgb.push_back(static_cast<uint8_t>(color >> shift));
    }
  }
  return image;
}

std::string chat_body(const std::string& model, const std::string& messages, int64_t output_tokens) {
  Json fields = {{"max_tokens", output_tokens},
                 {"ignore_eos", true},
                 {"temperature", 0},
                 {"stream", true},
                 {"stream_options", {{"include_usage", true}}}};
  if (!model.empty()) fields["model"] = model;
  return absl::StrCat("{\"messages\":", messages, ",", fields.dump().substr(1));
}

uint64_t LoadContent::choose_image(ImageSize size) {
  uint64_t& distinct = distinct_[{size.width, size.height}];
  Rng rng(options_.seed, kRepeatStream + images_++);
  if (distinct > 0 && rng.uniform() < options_.repeat_images) return rng.below(distinct);
  return distinct++;
}

std::string LoadContent::body(const LoadRequest& request, uint64_t index) {
  if (!request.messages.empty()) return chat_body(options_.model, request.messages, request.output_tokens);
  std::string parts;
  for (const ImageSize& size : request.images) {
    const Image image = load_image(options_.seed, choose_image(size), size);
    absl::StrAppend(&parts, parts.empty() ? "" : ",", image_part(encode_png(image)));
  }
  if (request.text_tokens > 0) {
    const double words = static_cast<double>(request.text_tokens) / options_.tokens_per_word;
    const Json text = {{"type", "text"},
                       {"text", load_text(options_.seed, index, std::max<int64_t>(1, std::llround(words)))}};
    absl::StrAppend(&parts, parts.empty() ? "" : ",", text.dump());
  }
  const std::string messages = absl::StrCat(R"([{"role":"user","content":[)", parts, "]}]");
  return chat_body(options_.model, messages, request.output_tokens);
}

}  // namespace parvl
