// The mixed load that `parvl-engine bench` and bench/serve/peer_batch.py both make: the same lengths and the same
// tokens, by formula.
#pragma once

#include <cstdint>
#include <vector>

namespace parvl {

struct MixedLength {
  int64_t prompt = 0;
  int64_t output = 0;
};

// A multiplicative hash: as good as random here, and one line in any language.
inline int64_t mixed_hash(int64_t i) { return ((i + 1) * int64_t{2654435761}) % (int64_t{1} << 32) / 65536; }

inline std::vector<MixedLength> mixed_lengths(int64_t count, int64_t max_prompt, int64_t max_new) {
  std::vector<MixedLength> out;
  for (int64_t i = 0; i < count; ++i) {
    out.push_back({8 + mixed_hash(2 * i) % (max_prompt - 7), 4 + mixed_hash(2 * i + 1) % (max_new - 3)});
  }
  return out;
}

inline int32_t mixed_token(int64_t request, int64_t position) {
  return static_cast<int32_t>(mixed_hash(request * 1000 + position) % 256);
}

}  // namespace parvl
