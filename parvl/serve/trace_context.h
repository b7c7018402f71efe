// W3C trace context: which distributed trace a request belongs to.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace parvl {

struct TraceContext {
  std::string trace_id;   // 32 hexadecimal digits
  std::string parent_id;  // 16: the caller's span
};

// Of a `traceparent` header; nullopt when it is absent or malformed, which the standard has us ignore. Versions after
// 00 may say more behind what is read here.
std::optional<TraceContext> parse_traceparent(std::string_view header);

}  // namespace parvl
