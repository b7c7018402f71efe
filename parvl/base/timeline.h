// A recording of what ran when, as a file of trace events (JSON) that Perfetto's and Chrome's viewers open.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/ids.h"
#include "parvl/base/log.h"
#include "parvl/base/status.h"

namespace parvl {

// A row of nested spans that belongs to one request. 0: of nobody; whatever is told of it is dropped.
using TrackId = StrongId<struct TrackTag, int64_t>;

// Every event is in the file, and the file is whole JSON, as soon as the call returns: a process that dies leaves a
// trace that loads. While it does not record, a call costs a look at a flag. Times are the Clock's seconds.
// Thread-safe.
class Timeline {
 public:
  struct Options {
    std::string path;                        // of the first recording; later ones are NAME-2.json and so on
    int64_t max_bytes = int64_t{256} << 20;  // of one recording, which ends there
  };
  // `clock` must outlive it. Nothing is recorded before `start`.
  Timeline(Options options, const Clock& clock) : options_(std::move(options)), clock_(clock) {}
  ~Timeline();

  // Begins a file, or ends it; gives its path. FailedPrecondition when it is recording already, or is not;
  // InvalidArgument naming a path that cannot be written. A disk that gets full later ends a recording with a warning.
  absl::StatusOr<std::string> start();
  absl::StatusOr<std::string> stop();
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  int64_t session() const { return session_.load(std::memory_order_relaxed); }  // which recording; 0: none yet

  // A row for one of the process's threads.
  int add_lane(std::string name);
  void lane_span(int lane, std::string_view name, double begin_s, double end_s, const LogFields& args = {});

  TrackId new_track();  // 0 while nothing is recorded
  // Spans of a track in one category nest; those of two categories are two rows.
  void begin(TrackId track, std::string_view name, double at_s, const LogFields& args = {});
  void end(TrackId track, std::string_view name, double at_s, const LogFields& args = {});
  void span(TrackId track, std::string_view name, double begin_s, double end_s, const LogFields& args = {},
            const std::string& category = "request");
  void mark(TrackId track, std::string_view name, double at_s);  // something that takes no time
  void counter(std::string_view name, double at_s, double value);

 private:
  bool follows(TrackId track) const { return recording() && track.value >> 32 == session_.load(); }
  void write(const std::string& events);  // each begins with a comma
  void write_at_end(const std::string& events);
  void close_file();

  const Options options_;
  const Clock& clock_;
  std::atomic<bool> recording_{false};
  std::atomic<int64_t> session_{0}, next_track_{1};
  std::mutex mutex_;  // guards what follows
  std::vector<std::string> lanes_;
  std::string path_;  // of the recording
  int file_ = -1;
  int64_t end_ = 0;  // where the next event goes; the closing brackets stand there until then
};

}  // namespace parvl
