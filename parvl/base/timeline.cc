#include "parvl/base/timeline.h"

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <utility>

#include "parvl/base/json.h"

namespace parvl {
namespace {

constexpr std::string_view kTail = "\n]}\n";
constexpr int kRequests = 1, kEngine = 2;  // the groups of rows, "processes" to a viewer
constexpr int64_t kRoomForLast = 256;

std::string json_text(std::string_view text) {
  return Json(std::string(text)).dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Microseconds to the nanosecond, without an exponent.
std::string stamp(double seconds) {
  const int64_t ns = std::llround(seconds * 1e9);
  const int64_t positive = ns < 0 ? 0 : ns;
  return absl::StrCat(positive / 1000, ".", absl::Dec(positive % 1000, absl::kZeroPad3));
}

std::string args_text(const LogFields& args) {
  std::string out = "{";
  for (const auto& [name, value] : args) {
    absl::StrAppend(&out, out.size() > 1 ? "," : "", json_text(name), ":");
    if (const auto* text = std::get_if<std::string>(&value)) {
      out += json_text(*text);
    } else if (const auto* whole = std::get_if<int64_t>(&value)) {
      absl::StrAppend(&out, *whole);
    } else {
      out += Json(std::get<double>(value)).dump();
    }
  }
  return out + "}";
}

std::string event(const char* phase, std::string_view name, int group, int lane, double at_s, const std::string& more) {
  return absl::StrCat(",\n{\"ph\":\"", phase, "\",\"name\":", json_text(name), ",\"pid\":", group, ",\"tid\":", lane,
                      ",\"ts\":", stamp(at_s), more, "}");
}

std::string track_event(const char* phase, const std::string& category, TrackId track, std::string_view name,
                        double at_s, const LogFields& args) {
  return event(phase, name, kRequests, 0, at_s,
               absl::StrCat(",\"cat\":\"", category, "\",\"id\":\"0x", absl::Hex(track.value & 0xffffffff),
                            "\",\"args\":", args_text(args)));
}

std::string name_event(const char* what, int group, int lane, std::string_view name) {
  return absl::StrCat(",\n{\"ph\":\"M\",\"name\":\"", what, "\",\"pid\":", group, ",\"tid\":", lane,
                      ",\"args\":{\"name\":", json_text(name), "}}");
}

}  // namespace

Timeline::~Timeline() { close_file(); }

absl::StatusOr<std::string> Timeline::start() {
  std::lock_guard lock(mutex_);
  if (recording()) return absl::FailedPreconditionError("a trace is being recorded to " + path_);
  const std::filesystem::path first(options_.path);
  path_ = options_.path;
  if (session_ > 0) {
    const std::string name = absl::StrCat(first.stem().string(), "-", session_ + 1, first.extension().string());
    path_ = (first.parent_path() / name).string();
  }
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file_ < 0) return invalid("cannot write the trace ", path_, ": ", std::strerror(errno));
  end_ = 0;
  ++session_;
  recording_ = true;
  std::string head =
      absl::StrCat("{\"displayTimeUnit\":\"ms\",\"otherData\":{\"clock_s\":", stamp(clock_.now_seconds()),
                   ",\"unix_s\":", clock_.wall_ns() / 1'000'000'000, "},\"traceEvents\":[");
  head += name_event("process_name", kRequests, 0, "requests").substr(1);  // no comma before the first
  head += name_event("process_name", kEngine, 0, "engine");
  for (size_t i = 0; i < lanes_.size(); ++i) {
    head += name_event("thread_name", kEngine, static_cast<int>(i) + 1, lanes_[i]);
  }
  write_at_end(head);
  if (!recording()) return invalid("cannot write the trace ", path_, ": no space left, or the disk fails");
  return path_;
}

absl::StatusOr<std::string> Timeline::stop() {
  std::lock_guard lock(mutex_);
  if (!recording()) return absl::FailedPreconditionError("no trace is being recorded");
  close_file();
  return path_;
}

void Timeline::close_file() {
  recording_ = false;
  if (file_ >= 0) ::close(std::exchange(file_, -1));
}

int Timeline::add_lane(std::string name) {
  std::lock_guard lock(mutex_);
  lanes_.push_back(std::move(name));
  const int lane = static_cast<int>(lanes_.size());
  if (recording()) write_at_end(name_event("thread_name", kEngine, lane, lanes_.back()));
  return lane;
}

TrackId Timeline::new_track() {
  if (!recording()) return {};
  return TrackId{session_ << 32 | (next_track_++ & 0xffffffff)};
}

void Timeline::lane_span(int lane, std::string_view name, double begin_s, double end_s, const LogFields& args) {
  if (!recording()) return;
  write(event("X", name, kEngine, lane, begin_s,
              absl::StrCat(",\"dur\":", stamp(end_s - begin_s), ",\"args\":", args_text(args))));
}

void Timeline::begin(TrackId track, std::string_view name, double at_s, const LogFields& args) {
  if (follows(track)) write(track_event("b", "request", track, name, at_s, args));
}

void Timeline::end(TrackId track, std::string_view name, double at_s, const LogFields& args) {
  if (follows(track)) write(track_event("e", "request", track, name, at_s, args));
}

void Timeline::span(TrackId track, std::string_view name, double begin_s, double end_s, const LogFields& args,
                    const std::string& category) {
  if (!follows(track)) return;
  write(track_event("b", category, track, name, begin_s, args) + track_event("e", category, track, name, end_s, {}));
}

void Timeline::mark(TrackId track, std::string_view name, double at_s) {
  if (follows(track)) write(track_event("n", "request", track, name, at_s, {}));
}

void Timeline::counter(std::string_view name, double at_s, double value) {
  if (!recording()) return;
  write(event("C", name, kEngine, 0, at_s, absl::StrCat(",\"args\":{\"value\":", Json(value).dump(), "}")));
}

void Timeline::write(const std::string& events) {
  std::lock_guard lock(mutex_);
  if (!recording()) return;
  if (end_ + static_cast<int64_t>(events.size()) + kRoomForLast <= options_.max_bytes) return write_at_end(events);
  write_at_end(event("i", "the trace is full (--trace-max-bytes)", kEngine, 0, clock_.now_seconds(), ",\"s\":\"g\""));
  close_file();
  log_warning("the trace ", path_, " ends here: it has reached ", options_.max_bytes, " bytes (--trace-max-bytes)");
}

// One call of the system, which takes the brackets' place and puts them behind: whoever reads meanwhile, or after the
// process is gone, finds whole JSON.
void Timeline::write_at_end(const std::string& events) {
  const std::string text = events + std::string(kTail);
  const ssize_t written = ::pwrite(file_, text.data(), text.size(), end_);
  if (written == static_cast<ssize_t>(text.size())) {
    end_ += static_cast<int64_t>(events.size());
    return;
  }
  const std::string why = written < 0 ? std::strerror(errno) : "no space left";
  if (written > 0) [[maybe_unused]]
    const ssize_t back = ::pwrite(file_, kTail.data(), kTail.size(), end_);
  if (::ftruncate(file_, end_ + static_cast<int64_t>(kTail.size())) != 0) end_ = 0;
  close_file();
  log_warning("the trace ", path_, " ends here: ", why);
}

}  // namespace parvl
