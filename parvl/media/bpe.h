// Byte-pair merging of one word.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/media/tokenizer.h"

namespace parvl {

// Filled by the file's reader, immutable afterwards.
struct BpeModel {
  struct Merge {
    uint32_t rank = 0;
    TokenId result = 0;
  };
  static uint64_t pair_key(TokenId left, TokenId right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }

  absl::flat_hash_map<std::string, TokenId> by_bytes;
  absl::flat_hash_map<uint64_t, Merge> merges;
  TokenId of_byte[256];        // -1: the vocabulary lacks the byte
  bool ignore_merges = false;  // a word that is in the vocabulary as a whole is one token

  // Appends the word's tokens; positions are `offset` plus those within the word. Bytes that the vocabulary lacks are
  // dropped, as the `tokenizers` library does. O(n log n) in the word's length.
  void encode_word(std::string_view word, size_t offset, std::vector<EncodedToken>& out) const;
};

}  // namespace parvl
