// One line an event on standard error: "warning: unknown field 'foo' is ignored". Lines of several threads never mix.
#pragma once

#include <absl/strings/str_cat.h>

#include <string>
#include <string_view>

namespace parvl {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// What is below `level` is dropped (default kInfo). Thread-safe, for the whole process.
void set_log_level(LogLevel level);
void log_line(LogLevel level, std::string_view message);
// "warning: text" without the line break; a message's own line breaks become spaces.
std::string format_log_line(LogLevel level, std::string_view message);

template <typename... Args>
void log_debug(const Args&... args) {
  log_line(LogLevel::kDebug, absl::StrCat(args...));
}
template <typename... Args>
void log_info(const Args&... args) {
  log_line(LogLevel::kInfo, absl::StrCat(args...));
}
template <typename... Args>
void log_warning(const Args&... args) {
  log_line(LogLevel::kWarning, absl::StrCat(args...));
}
template <typename... Args>
void log_error(const Args&... args) {
  log_line(LogLevel::kError, absl::StrCat(args...));
}

}  // namespace parvl
