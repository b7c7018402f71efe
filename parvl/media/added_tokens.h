// Finding added tokens (special ones and others) in text.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/media/split.h"
#include "parvl/media/tokenizer.h"

namespace parvl {

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool special = false;
  bool lstrip = false;       // takes white space before it with it
  bool rstrip = false;       // and after it
  bool normalized = false;   // looked for after normalisation
  bool single_word = false;  // not within a word
};

// A set of added tokens. Filled once, immutable afterwards.
class AddedTokenMatcher {
 public:
  void add(const AddedToken& token);
  bool empty() const { return tokens_.empty(); }

  struct Piece {
    TokenId id = -1;  // -1: text between tokens
    TextRange range;
  };
  // Cuts `text` at the tokens: leftmost first, of those the longest that `may_match` allows (it gets the token's own
  // bytes, without stripped space). The pieces cover the text in order.
  std::vector<Piece> cut(std::string_view text, const std::function<bool(TextRange)>& may_match) const;

 private:
  // The longest allowed token that starts at `at`; -1 for none.
  int longest_at(std::string_view text, size_t at, const std::function<bool(TextRange)>& may_match) const;

  std::vector<AddedToken> tokens_;
  // A trie: (node, byte) → node, and the token that ends at a node or -1. Node 0 is the root.
  absl::flat_hash_map<uint64_t, uint32_t> next_;
  std::vector<int> ends_ = {-1};
};

}  // namespace parvl
