#include "parvl/train/made_up_data.h"

#include <iterator>

#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/base/rng.h"
#include "parvl/media/image.h"

namespace parvl {
namespace {

constexpr const char* kWords[] = {"red", "circle", "left of", "the", "small", "seven", "blue", "square", "under", "a"};

std::string made_up_text(Rng& rng, uint64_t most) {
  std::string out = "what";
  for (uint64_t words = 1 + rng.below(most); words > 0; --words) {
    absl::StrAppend(&out, " ", kWords[rng.below(std::size(kWords))]);
  }
  return out;
}

absl::Status write_image(const std::string& path, Rng& rng) {
  Image image;
  image.width = static_cast<int>(32 + rng.below(160));
  image.height = static_cast<int>(32 + rng.below(160));
  image.rgb.resize(static_cast<size_t>(image.width) * static_cast<size_t>(image.height) * 3);
  for (uint8_t& value : image.rgb) value = static_cast<uint8_t>(rng.next());
  return write_file_atomically(path, encode_png(image));
}

}  // namespace

absl::Status write_made_up_data(const std::string& folder, int64_t samples, bool images) {
  Rng rng(/*seed=*/1);
  std::string lines;
  for (int64_t i = 0; i < samples; ++i) {
    Json content = Json::array();
    for (uint64_t left = images ? rng.below(3) : 0; left > 0; --left) {
      const std::string name = absl::StrCat(i, "-", left, ".png");
      PARVL_RETURN_IF_ERROR(write_image(folder + "/" + name, rng));
      content.push_back({{"type", "image"}, {"image", name}});
    }
    content.push_back({{"type", "text"}, {"text", made_up_text(rng, 12)}});
    Json messages = {{{"role", "user"}, {"content", content}}};
    if (i % 5 != 4) messages.push_back({{"role", "assistant"}, {"content", made_up_text(rng, 6)}});
    if (i % 6 == 2) {
      messages.push_back({{"role", "user"}, {"content", "sure?"}});
      messages.push_back({{"role", "assistant"}, {"content", "yes"}});
    }
    absl::StrAppend(&lines, Json({{"messages", messages}}).dump(), "\n");
  }
  return write_file_atomically(folder + "/data.jsonl", lines);
}

}  // namespace parvl
