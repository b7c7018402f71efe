// What the scheduler knows of a request: ids and counts, no pixels and no text.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "parvl/base/ids.h"
#include "parvl/base/status.h"

namespace parvl {

enum class Modality { kImage, kVideo, kAudio };
constexpr int kModalities = 3;

// Identity of an item's encoder input: SHA-256 over the source bytes, the processor's version and the request's
// keyword arguments. Equal keys mean equal encoder output.
struct MediaKey {
  std::array<uint8_t, 32> bytes{};
  friend auto operator<=>(const MediaKey&, const MediaKey&) = default;
  template <typename H>
  friend H AbslHashValue(H state, const MediaKey& key) {
    return H::combine(std::move(state), key.bytes);
  }
};

// One image (video, sound) of a prompt: its placeholder tokens are [begin, begin + length).
struct MediaItem {
  MediaKey key;
  Modality modality = Modality::kImage;
  int64_t begin = 0;
  int64_t length = 0;
  int64_t cost = 0;   // work of encoding it, in the modality's unit (patches for images)
  int64_t bytes = 0;  // of its encoder output
  int64_t end() const { return begin + length; }
};

struct SchedRequest {
  RequestId id;
  int priority = 0;  // a lower number goes first
  std::vector<TokenId> prompt;
  std::vector<MediaItem> media;  // in order of position, not overlapping
  std::string cache_salt;        // requests of different salts share no prefix
  int64_t given = 0;             // leading tokens whose keys and values lie elsewhere, computed, to be brought here
};

// OK, or one sentence: no tokens, a negative count, items out of order, over one another or beyond the prompt, or more
// given than all tokens but the last.
absl::Status validate(const SchedRequest& request);

}  // namespace parvl
