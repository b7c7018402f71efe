#include "parvl/serve/trace_context.h"

#include <algorithm>

namespace parvl {
namespace {

bool is_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool is_id(std::string_view text) { return is_hex(text) && text.find_first_not_of('0') != std::string_view::npos; }

}  // namespace

// version "-" trace id "-" parent id "-" flags
std::optional<TraceContext> parse_traceparent(std::string_view header) {
  constexpr size_t kLength = 2 + 1 + 32 + 1 + 16 + 1 + 2;
  if (header.size() < kLength || header[2] != '-' || header[35] != '-' || header[52] != '-') return std::nullopt;
  const std::string_view version = header.substr(0, 2), trace_id = header.substr(3, 32),
                         parent_id = header.substr(36, 16), flags = header.substr(53, 2);
  const bool longer = header.size() > kLength;
  if (!is_hex(version) || version == "ff" || !is_id(trace_id) || !is_id(parent_id) || !is_hex(flags))
    return std::nullopt;
  if (longer && (version == "00" || header[kLength] != '-')) return std::nullopt;
  return TraceContext{std::string(trace_id), std::string(parent_id)};
}

}  // namespace parvl
