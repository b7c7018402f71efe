// How large a schema or pattern may be.
#include <algorithm>

#include "parvl/media/json_schema.h"

namespace parvl {
namespace {

// Above it {n,m} would make an automaton too large; 0 when the pattern has none.
int64_t largest_repeat(std::string_view pattern) {
  int64_t largest = 0, number = 0;
  bool in_braces = false;
  for (const char c : pattern) {
    if (c == '{' || c == '}') in_braces = c == '{';
    const bool digit = in_braces && c >= '0' && c <= '9';
    number = digit ? std::min<int64_t>(number * 10 + (c - '0'), 1'000'000'000) : 0;
    largest = std::max(largest, number);
  }
  return largest;
}

}  // namespace

absl::Status check_pattern(std::string_view pattern, const std::string& where) {
  PARVL_RETURN_IF_ERROR(check_grammar_bytes(pattern.size(), where, SchemaLimits::kMaxPatternBytes));
  if (largest_repeat(pattern) <= SchemaLimits::kMaxRepeat) return absl::OkStatus();
  return invalid(where, " repeats something more than ", SchemaLimits::kMaxRepeat, " times");
}

absl::Status check_grammar_bytes(size_t bytes, const std::string& where, size_t limit) {
  if (bytes <= limit) return absl::OkStatus();
  return invalid(where, ": ", bytes, " bytes are over the limit of ", limit);
}

}  // namespace parvl
