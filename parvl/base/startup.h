// What a program tells while it starts: its phases with their times, and a sign of life where one takes long.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "parvl/base/clock.h"

namespace parvl {

// Thread-safe.
class Startup {
 public:
  using Tell = std::function<void(const std::string& line)>;
  static constexpr double kSilence = 4;  // seconds; nobody waits longer than that and a beat

  // `clock` must outlive it.
  Startup(const Clock& clock, Tell tell);

  // The phase before ends, this one begins.
  void begin(const std::string& phase);
  // How far the phase is. Tells so when nothing was told for kSilence.
  void progress(int64_t done_bytes, int64_t total_bytes);
  // To be called about once a second: the same.
  void beat();
  // The last phase ends. "ready after 3.4 s: files 0.1 s, weights 2.9 s at 5.3 GB/s, ...".
  void finish();

 private:
  struct Phase {
    std::string name;
    double seconds = 0;
    int64_t bytes = 0;
  };
  // With the mutex.
  void tell_if_silent();
  void end_phase(double now);

  const Clock& clock_;
  const Tell tell_;
  std::mutex mutex_;
  std::vector<Phase> phases_;  // the last one runs
  double start_, phase_start_, last_told_;
  int64_t done_ = 0, total_ = 0;
  bool finished_ = false;
};

// Beats for as long as it lives.
class Heartbeat {
 public:
  explicit Heartbeat(std::shared_ptr<Startup> startup);
  ~Heartbeat();

 private:
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace parvl
