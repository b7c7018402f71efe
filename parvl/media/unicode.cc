#include "parvl/media/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "parvl/base/check.h"

namespace parvl {
namespace {

constexpr uint16_t kNone = UINT16_MAX;  // utf8proc's "no such entry"

// The class by which marks are ordered; 0 for what starts a character.
int combining_class(int32_t code) { return utf8proc_get_property(code)->combining_class; }

// Whether composition can never reach across the place before `code`. May say no where yes were right.
bool starts_chunk(char32_t code) {
  if (code < 0x80) return true;
  if (code >= 0xAC00 && code <= 0xD7A3) return true;            // whole Hangul syllables
  if (code >= 0x1100 && code <= 0x11FF) return code <= 0x115F;  // Hangul parts: only a leading consonant starts
  const utf8proc_property_t* property = utf8proc_get_property(static_cast<int32_t>(code));
  return property->combining_class == 0 && property->decomp_seqindex == kNone && property->comb_index == kNone;
}

// The NFC form of one chunk of valid UTF-8. Ordering marks by a sort of our own keeps a long row of marks from taking
// quadratic time.
std::string compose(std::string_view chunk) {
  constexpr auto kDecompose = static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE);
  constexpr auto kCompose = static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE);
  std::vector<int32_t> codes;
  for (size_t at = 0; at < chunk.size();) {
    const Utf8Step step = utf8_step(chunk, at);
    at += step.length;
    std::array<int32_t, 32> parts;
    int boundary = 0;
    const auto count =
        utf8proc_decompose_char(static_cast<int32_t>(step.code), parts.data(), parts.size(), kDecompose, &boundary);
    PARVL_CHECK(count > 0 && static_cast<size_t>(count) <= parts.size(), "utf8proc cannot decompose a valid character");
    codes.insert(codes.end(), parts.begin(), parts.begin() + count);
  }
  for (size_t i = 0; i < codes.size();) {
    if (combining_class(codes[i]) == 0) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < codes.size() && combining_class(codes[end]) != 0) ++end;
    std::stable_sort(codes.begin() + static_cast<std::ptrdiff_t>(i), codes.begin() + static_cast<std::ptrdiff_t>(end),
                     [](int32_t a, int32_t b) { return combining_class(a) < combining_class(b); });
    i = end;
  }
  const auto length = utf8proc_normalize_utf32(codes.data(), static_cast<utf8proc_ssize_t>(codes.size()), kCompose);
  PARVL_CHECK(length >= 0, "utf8proc cannot compose");
  std::string out;
  for (utf8proc_ssize_t i = 0; i < length; ++i) append_utf8(out, static_cast<char32_t>(codes[static_cast<size_t>(i)]));
  return out;
}

void append_mapped(NormalizedText& out, std::string_view text, size_t begin, size_t end) {
  out.text += text;
  out.begin.resize(out.text.size(), begin);
  out.end.resize(out.text.size(), end);
}

void append_same(NormalizedText& out, std::string_view text, size_t begin) {
  out.text += text;
  for (size_t i = 0; i < text.size(); ++i) {
    out.begin.push_back(begin + i);
    out.end.push_back(begin + i + 1);
  }
}

// The end of the chunk of valid characters that starts at `at`.
size_t chunk_end(std::string_view text, size_t at) {
  size_t end = at + utf8_step(text, at).length;
  while (end < text.size()) {
    const Utf8Step step = utf8_step(text, end);
    if (step.kind != Utf8Step::Kind::kValid || starts_chunk(step.code)) break;
    end += step.length;
  }
  return end;
}

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// byte → character of GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on.
const std::array<int, 0x144>& byte_of_character() {
  static const std::array<int, 0x144> table = [] {
    std::array<int, 0x144> bytes;
    bytes.fill(-1);
    int next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      bytes[static_cast<size_t>(printable ? byte : next++)] = byte;
    }
    return bytes;
  }();
  return table;
}

}  // namespace

Utf8Step utf8_step(std::string_view bytes, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[at + i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {Utf8Step::Kind::kValid, 1, lead};
  const size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                        : (lead & 0xF0) == 0xE0        ? 3
                        : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                       : 0;
  if (length == 0) return {Utf8Step::Kind::kInvalid, 1, 0};
  char32_t code = lead & (0xFFu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if (at + i == bytes.size()) return {Utf8Step::Kind::kIncomplete, i, 0};
    unsigned low = 0x80, high = 0xBF;
    if (i == 1) {  // no over-long forms, surrogates, or codes past U+10FFFF
      if (lead == 0xE0) low = 0xA0;
      if (lead == 0xED) high = 0x9F;
      if (lead == 0xF0) low = 0x90;
      if (lead == 0xF4) high = 0x8F;
    }
    if (byte(i) < low || byte(i) > high) return {Utf8Step::Kind::kInvalid, i, 0};
    code = code << 6 | (byte(i) & 0x3F);
  }
  return {Utf8Step::Kind::kValid, length, code};
}

bool is_valid_utf8(std::string_view bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const Utf8Step step = utf8_step(bytes, at);
    if (step.kind != Utf8Step::Kind::kValid) return false;
    at += step.length;
  }
  return true;
}

std::string repair_utf8(std::string_view bytes) {
  std::string out;
  for (size_t at = 0; at < bytes.size();) {
    const Utf8Step step = utf8_step(bytes, at);
    out += step.kind == Utf8Step::Kind::kValid ? bytes.substr(at, step.length) : kReplacement;
    at += step.length;
  }
  return out;
}

void append_utf8(std::string& out, char32_t code) {
  std::array<utf8proc_uint8_t, 4> bytes;
  const auto length = utf8proc_encode_char(static_cast<int32_t>(code), bytes.data());
  out.append(reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(length));
}

std::string one_line(std::string_view text, size_t max_bytes) {
  std::string out = repair_utf8(text.substr(0, max_bytes));
  if (text.size() > max_bytes) out += "...";
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return out;
}

bool is_white_space(char32_t code) {
  if (code >= 0x09 && code <= 0x0D) return true;
  if (code == 0x85) return true;
  const auto category = utf8proc_category(static_cast<int32_t>(code));
  return category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL || category == UTF8PROC_CATEGORY_ZP;
}

bool is_word_character(char32_t code) {
  const auto category = utf8proc_category(static_cast<int32_t>(code));
  return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) ||
         (category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME) || category == UTF8PROC_CATEGORY_ND ||
         category == UTF8PROC_CATEGORY_PC;
}

bool normalize(std::string_view text, bool nfc, NormalizedText& out) {
  if (is_ascii(text) || (!nfc && is_valid_utf8(text))) return false;
  NormalizedText made;
  bool changed = false;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = utf8_step(text, at);
    if (step.kind != Utf8Step::Kind::kValid) {
      append_mapped(made, kReplacement, at, at + step.length);
      changed = true;
      at += step.length;
      continue;
    }
    const size_t end = nfc ? chunk_end(text, at) : at + step.length;
    const std::string_view chunk = text.substr(at, end - at);
    const bool plain = end == at + step.length && starts_chunk(step.code);
    const std::string composed = !nfc || plain ? std::string() : compose(chunk);
    if (!nfc || plain || composed == chunk) {
      append_same(made, chunk, at);
    } else {
      append_mapped(made, composed, at, end);
      changed = true;
    }
    at = end;
  }
  if (changed) out = std::move(made);
  return changed;
}

bool bytes_of_spelled(std::string_view spelled, std::string& bytes) {
  const auto& table = byte_of_character();
  bytes.clear();
  for (size_t at = 0; at < spelled.size();) {
    const Utf8Step step = utf8_step(spelled, at);
    if (step.kind != Utf8Step::Kind::kValid || step.code >= table.size() || table[step.code] < 0) return false;
    bytes += static_cast<char>(table[step.code]);
    at += step.length;
  }
  return true;
}

}  // namespace parvl
