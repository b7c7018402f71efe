// The text type of the Jinja engine, in place of its own jinja/string.cpp: that one knows white space and letter case
// of ASCII only, and templates that trim a message must trim what Python's strip does.
#include <utf8proc.h>

#include <algorithm>
#include <functional>

#include "jinja/string.h"
#include "parvl/media/jinja_limits.h"
#include "parvl/media/unicode.h"

namespace jinja {
namespace {

using parvl::Utf8Step;

bool is_python_space(char32_t code) { return parvl::is_white_space(code) || (code >= 0x1C && code <= 0x1F); }

// Replaces each character by what `change` makes of it; bytes that are no character stay.
void map_characters(string& text, const std::function<char32_t(char32_t)>& change) {
  parvl::spend_template_bytes(4 * static_cast<int64_t>(text.length()));
  for (string_part& part : text.parts) {
    std::string out;
    for (size_t at = 0; at < part.val.size();) {
      const Utf8Step step = parvl::utf8_step(part.val, at);
      if (step.kind == Utf8Step::Kind::kValid) {
        parvl::append_utf8(out, change(step.code));
      } else {
        out.append(part.val, at, step.length);
      }
      at += step.length;
    }
    part.val = std::move(out);
  }
}

char32_t upper(char32_t code) { return static_cast<char32_t>(utf8proc_toupper(static_cast<int32_t>(code))); }
char32_t lower(char32_t code) { return static_cast<char32_t>(utf8proc_tolower(static_cast<int32_t>(code))); }

size_t spaces_at_start(const std::string& text, const std::function<bool(char32_t)>& strips) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8Step step = parvl::utf8_step(text, at);
    if (step.kind != Utf8Step::Kind::kValid || !strips(step.code)) break;
    at += step.length;
  }
  return at;
}

size_t end_without_spaces(const std::string& text, const std::function<bool(char32_t)>& strips) {
  size_t end = text.size();
  while (end > 0) {
    size_t start = end - 1;
    while (start > 0 && end - start < 4 && (text[start] & 0xC0) == 0x80) --start;
    const Utf8Step step = parvl::utf8_step(text, start);
    if (step.kind != Utf8Step::Kind::kValid || start + step.length != end || !strips(step.code)) break;
    end = start;
  }
  return end;
}

}  // namespace

bool string_part::is_uppercase() const {
  return std::none_of(val.begin(), val.end(), [](char c) { return c >= 'a' && c <= 'z'; });
}

bool string_part::is_lowercase() const {
  return std::none_of(val.begin(), val.end(), [](char c) { return c >= 'A' && c <= 'Z'; });
}

void string::mark_input() {
  for (string_part& part : parts) part.is_input = true;
}

std::string string::str() const {
  parvl::spend_template_steps(1);
  parvl::spend_template_bytes(static_cast<int64_t>(length()));
  std::string out;
  for (const string_part& part : parts) out += part.val;
  return out;
}

size_t string::length() const {
  size_t length = 0;
  for (const string_part& part : parts) length += part.val.size();
  return length;
}

void string::hash_update(hasher& hash) const noexcept {
  for (const string_part& part : parts) hash.update(part.val.data(), part.val.size());
}

bool string::all_parts_are_input() const {
  return std::all_of(parts.begin(), parts.end(), [](const string_part& part) { return part.is_input; });
}

bool string::is_uppercase() const {
  return std::all_of(parts.begin(), parts.end(), [](const string_part& part) { return part.is_uppercase(); });
}

bool string::is_lowercase() const {
  return std::all_of(parts.begin(), parts.end(), [](const string_part& part) { return part.is_lowercase(); });
}

void string::mark_input_based_on(const string& other) {
  if (other.all_parts_are_input()) mark_input();
}

// Neighbours of the same origin become one part.
string& string::append(const string& other) {
  if (this == &other) return append(string(other));
  for (const string_part& part : other.parts) {
    parvl::spend_template_steps(1);
    parvl::spend_template_bytes(static_cast<int64_t>(part.val.size()));
    if (!parts.empty() && parts.back().is_input == part.is_input) {
      parts.back().val += part.val;
    } else {
      parvl::spend_template_bytes(sizeof(string_part));
      parts.push_back(part);
    }
  }
  return *this;
}

string string::uppercase() {
  map_characters(*this, upper);
  return *this;
}

string string::lowercase() {
  map_characters(*this, lower);
  return *this;
}

string string::capitalize() {
  bool first = true;
  map_characters(*this, [&](char32_t code) {
    const char32_t out = first ? upper(code) : lower(code);
    first = false;
    return out;
  });
  return *this;
}

string string::titlecase() {
  bool starts_word = true;
  map_characters(*this, [&](char32_t code) {
    const char32_t out = starts_word ? upper(code) : lower(code);
    starts_word = is_python_space(code) || code == '-' || code == '(' || code == '{' || code == '[' || code == '<';
    return out;
  });
  return *this;
}

string string::strip(bool left, bool right, std::optional<const std::string_view> chars) {
  parvl::spend_template_bytes(static_cast<int64_t>(length()));
  std::u32string set;
  if (chars) {
    for (size_t at = 0; at < chars->size();) {
      const Utf8Step step = parvl::utf8_step(*chars, at);
      if (step.kind == Utf8Step::Kind::kValid) set += step.code;
      at += step.length;
    }
  }
  const auto strips = [&](char32_t code) {
    return chars ? set.find(code) != std::u32string::npos : is_python_space(code);
  };
  if (left) {
    size_t empty = 0;
    for (; empty < parts.size(); ++empty) {
      parts[empty].val.erase(0, spaces_at_start(parts[empty].val, strips));
      if (!parts[empty].val.empty()) break;
    }
    parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(empty));
  }
  while (right && !parts.empty()) {
    parts.back().val.resize(end_without_spaces(parts.back().val, strips));
    if (!parts.back().val.empty()) break;
    parts.pop_back();
  }
  return *this;
}

}  // namespace jinja
