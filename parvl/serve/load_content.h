// What a load test sends: chat requests with made-up text and images of given sizes, the same for the same seed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "parvl/media/image.h"

namespace parvl {

struct LoadRequest {
  std::vector<ImageSize> images;
  int64_t text_tokens = 0;
  int64_t output_tokens = 1;
  std::string messages;  // JSON of real messages; then images and text_tokens do not matter
};

struct ContentOptions {
  std::string model;  // "": the request names none
  uint64_t seed = 0;
  double repeat_images = 0;  // share of the images that an earlier request had too
  double tokens_per_word = 1;
};

// Words in an order of chance. All of them come once before one comes again, so a long text has the average of tokens a
// word that a whole vocabulary has.
std::string load_text(uint64_t seed, uint64_t index, int64_t words);
constexpr int64_t kLoadVocabulary = 32;

// Squares of chance colours: as many bytes as a photograph's JPEG, but cheap to encode. Two numbers give two images.
Image load_image(uint64_t seed, uint64_t number, ImageSize size);

// A streaming chat request that gives exactly output_tokens tokens.
std::string chat_body(const std::string& model, const std::string& messages, int64_t output_tokens);

// Not thread-safe.
class LoadContent {
 public:
  explicit LoadContent(ContentOptions options) : options_(std::move(options)) {}
  // The body of the request number `index`. To be asked for in order: which images come again depends on those before.
  std::string body(const LoadRequest& request, uint64_t index);

 private:
  uint64_t choose_image(ImageSize size);

  ContentOptions options_;
  uint64_t images_ = 0;                               // made so far
  std::map<std::pair<int, int>, uint64_t> distinct_;  // of each size
};

}  // namespace parvl
