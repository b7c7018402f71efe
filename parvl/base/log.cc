#include "parvl/base/log.h"

#include <atomic>
#include <cstdio>

#include "parvl/base/text.h"

namespace parvl {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kInfo};

const char* prefix(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug: ";
    case LogLevel::kInfo:
      return "";
    case LogLevel::kWarning:
      return "warning: ";
    case LogLevel::kError:
      return "error: ";
  }
  return "";
}

}  // namespace

void set_log_level(LogLevel level) { g_level = level; }

std::string format_log_line(LogLevel level, std::string_view message) { return prefix(level) + one_line(message); }

void log_line(LogLevel level, std::string_view message) {
  if (level < g_level) return;
  const std::string line = format_log_line(level, message) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);  // one call: stdio locks the stream for it
}

}  // namespace parvl
