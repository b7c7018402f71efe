// UTF-8 and Unicode for the tokenizer: stepping over text that may be invalid, NFC with positions, the byte-level
// alphabet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace parvl {

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// What stands at one position of a byte string.
struct Utf8Step {
  enum class Kind {
    kValid,
    kInvalid,     // `length` bytes (at least 1) that stand for one U+FFFD: the longest start of a character, as Unicode
                  // advises
    kIncomplete,  // the text ends within a character; `length` bytes are there
  };
  Kind kind = Kind::kInvalid;
  size_t length = 0;
  char32_t code = 0;  // kValid only
};
// `at` < bytes.size().
Utf8Step utf8_step(std::string_view bytes, size_t at);

bool is_valid_utf8(std::string_view bytes);
// With U+FFFD for every invalid part.
std::string repair_utf8(std::string_view bytes);
void append_utf8(std::string& out, char32_t code);
// For messages that quote what came from outside: valid, without control characters, at most `max_bytes` and "...".
std::string one_line(std::string_view text, size_t max_bytes);

// The White_Space property, and the regular-expression class \w (letters, marks, decimal digits, connectors).
bool is_white_space(char32_t code);
bool is_word_character(char32_t code);

// A text after normalisation, with the place each byte comes from.
struct NormalizedText {
  std::string text;
  // Per byte of `text`, the range of the original's bytes that gave it (a range may give several bytes).
  std::vector<size_t> begin, end;
};
// Repairs invalid UTF-8 and, if `nfc`, composes. False: `text` is already so, and `out` is left alone.
bool normalize(std::string_view text, bool nfc, NormalizedText& out);

// GPT-2's alphabet, in which every byte is a printable character. False: a character of `spelled` is not in it.
bool bytes_of_spelled(std::string_view spelled, std::string& bytes);

}  // namespace parvl
