#include "parvl/serve/pools/prefix_chain.h"

#include <cstring>

namespace parvl {
namespace {

// The finalizer of MurmurHash3 (Appleby, public domain), as SplitMix64 uses it.
uint64_t mix(uint64_t h, uint64_t value) {
  uint64_t z = (h ^ value) + 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace

uint64_t image_hash(const ProcessedImage& image) {
  uint64_t h = static_cast<uint64_t>(image.grid_h) << 32 | static_cast<uint32_t>(image.grid_w);
  for (size_t i = 0; i + sizeof h <= image.key.size(); i += sizeof h) {
    uint64_t part;
    std::memcpy(&part, image.key.data() + i, sizeof part);
    h = mix(h, part);
  }
  return h;
}

std::vector<uint64_t> prefix_chain(const Prompt& prompt, std::string_view salt, int64_t block_tokens) {
  std::vector<uint64_t> out;
  uint64_t h = 0;
  for (const char c : salt) h = mix(h, static_cast<uint8_t>(c));
  auto media = prompt.media.begin();
  for (int64_t i = 0; i < static_cast<int64_t>(prompt.ids.size()); ++i) {
    while (media != prompt.media.end() && i >= media->begin + media->length) ++media;
    h = mix(h, static_cast<uint32_t>(prompt.ids[static_cast<size_t>(i)]));
    if (media != prompt.media.end() && i == media->begin) {
      h = mix(h, image_hash(*prompt.images[static_cast<size_t>(media->image_index)]));
    }
    if ((i + 1) % block_tokens == 0) out.push_back(h);
  }
  return out;
}

}  // namespace parvl
