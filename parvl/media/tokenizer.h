// Byte-level BPE as in a Hugging Face tokenizer.json (Qwen2, Llama 3, GPT-2 kinds).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/ids.h"
#include "parvl/base/json.h"
#include "parvl/base/status.h"

namespace parvl {

// A run of text with one origin. Special tokens are recognised only where every byte comes from the template (or from a
// caller that is trusted), never inside text that a user typed. Ordinary tokens may span runs.
struct TextRun {
  std::string text;
  bool trusted = false;
};

struct EncodedToken {
  TokenId id = 0;
  size_t begin = 0;  // byte range in the concatenated runs
  size_t end = 0;
};

// Immutable after load; thread-safe.
class Tokenizer {
 public:
  // Reads DIR/tokenizer.json. What the file asks for and this reader does not know is an error naming it, never
  // ignored.
  static absl::StatusOr<std::shared_ptr<const Tokenizer>> load(const std::string& dir);
  // The same from a parsed file; `name` is what errors call it.
  static absl::StatusOr<std::shared_ptr<const Tokenizer>> from_json(const Json& json, const std::string& name);
  ~Tokenizer();

  std::vector<EncodedToken> encode(const std::vector<TextRun>& runs) const;
  std::vector<TokenId> encode(std::string_view text, bool trusted) const;
  // `text` after the file's normaliser and post-processor (the tokens it prepends, as Llama 3's <|begin_of_text|>), for
  // plain completions: what transformers' tokenizer(text) gives when `trusted`.
  std::vector<TokenId> encode_with_prefix(std::string_view text, bool trusted) const;

  // The bytes of one token; a special token gives its text. Empty for ids that have none.
  std::string_view token_bytes(TokenId id) const;
  bool is_special(TokenId id) const;
  // Whether the file adds the token, special or not: encode gives it only for its own, trusted text.
  bool is_added(TokenId id) const;
  std::string decode(const std::vector<TokenId>& ids, bool skip_special) const;  // invalid UTF-8 becomes U+FFFD
  // The id of a token by its text (added tokens and vocabulary), or -1.
  TokenId id_of(std::string_view token) const;
  // The texts of all added tokens, special or not.
  std::vector<std::string> added_texts() const;
  // One more than the largest id.
  int64_t vocab_size() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Holds back bytes until they are whole UTF-8 characters: feed tokens' bytes, take what may be shown.
class Utf8Stream {
 public:
  // The complete characters so far, in order; an incomplete tail (at most 3 bytes) waits. Bytes that can never become
  // valid come out as U+FFFD.
  std::string push(std::string_view bytes);
  std::string flush();  // the waiting tail as U+FFFD

 private:
  std::string pending_;
};

}  // namespace parvl
