#include "parvl/base/log.h"

#include <atomic>
#include <cstdio>
#include <ctime>

#include "parvl/base/clock.h"
#include "parvl/base/json.h"
#include "parvl/base/text.h"

namespace parvl {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kInfo};
std::atomic<LogFormat> g_format{LogFormat::kText};

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

const char* name_of(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "";
}

std::string timestamp(int64_t wall_ns) {
  const std::time_t seconds = wall_ns / 1'000'000'000;
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  char text[32];
  const size_t length = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
  const int64_t ms = wall_ns / 1'000'000 % 1000;
  return absl::StrCat(std::string(text, length), ".", absl::Dec(ms, absl::kZeroPad3), "Z");
}

}  // namespace

void set_log_level(LogLevel level) { g_level = level; }

void set_log_format(LogFormat format) { g_format = format; }

std::string format_log_line(LogLevel level, std::string_view message, const LogFields& fields) {
  std::string line = prefix(level) + std::string(message);
  for (const auto& [name, value] : fields) {
    std::visit([&, &name = name](const auto& plain) { absl::StrAppend(&line, " ", name, "=", plain); }, value);
  }
  return one_line(line);
}

std::string format_json_log_line(int64_t wall_ns, LogLevel level, std::string_view message, const LogFields& fields) {
  nlohmann::ordered_json line = {
      {"time", timestamp(wall_ns)}, {"level", name_of(level)}, {"message", one_line(message)}};
  for (const auto& [name, value] : fields) {
    std::visit([&, &name = name](const auto& plain) { line[name] = plain; }, value);
  }
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void log_line(LogLevel level, std::string_view message, const LogFields& fields) {
  if (level < g_level) return;
  const std::string line =
      (g_format == LogFormat::kJson ? format_json_log_line(RealClock().wall_ns(), level, message, fields)
                                    : format_log_line(level, message, fields)) +
      "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);  // one call: stdio locks the stream for it
}

}  // namespace parvl
