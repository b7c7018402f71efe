// One line an event on standard error: "warning: unknown field 'foo' is ignored", or the same as a JSON object. Lines
// of several threads never mix.
#pragma once

#include <absl/strings/str_cat.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace parvl {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };
// What a line tells beside its message, by name.
using LogFields = std::vector<std::pair<std::string, std::variant<std::string, int64_t, double>>>;

// What is below `level` is dropped (default kInfo). Thread-safe, for the whole process.
void set_log_level(LogLevel level);
// Default kText. Thread-safe, for the whole process.
void set_log_format(LogFormat format);
void log_line(LogLevel level, std::string_view message, const LogFields& fields = {});
// "warning: text name=value" without the line break; a message's own line breaks become spaces.
std::string format_log_line(LogLevel level, std::string_view message, const LogFields& fields = {});
// {"time": "2026-11-29T23:54:27.123Z", "level": "warning", "message": "text", "name": value}
std::string format_json_log_line(int64_t wall_ns, LogLevel level, std::string_view message,
                                 const LogFields& fields = {});

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
