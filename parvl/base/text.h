// Text for people: closest spellings, excerpts that are safe to print, one-line messages. And text out of URLs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace parvl {

// Number of single-character insertions, removals and replacements that turn `a` into `b`.
int edit_distance(std::string_view a, std::string_view b);

// `candidates`, the most alike to `word` first; equally alike ones stay in their order.
std::vector<std::string> closest_first(std::string_view word, std::vector<std::string> candidates);

// The best of `candidates` when it is alike enough to have been meant, else "".
std::string likely_meant(std::string_view word, const std::vector<std::string>& candidates);

// At most `max_bytes` of `text` in single quotes, unprintable bytes as '?', with "..." where it was cut.
std::string excerpt(std::string_view text, size_t max_bytes = 60);

// `text` on one line: line breaks and other control characters become single spaces, the ends are trimmed.
std::string one_line(std::string_view text);

// The text of a part of a URL: %41 → A; a '%' without two digits stays.
std::string percent_decode(std::string_view text);

}  // namespace parvl
