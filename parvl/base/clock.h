// Time comes from a Clock and from nowhere else, so that tests and the simulator can hand in their own.
#pragma once

#include <cstdint>

namespace parvl {

class Clock {
 public:
  virtual ~Clock() = default;
  // Nanoseconds from an arbitrary start; never goes back.
  virtual int64_t now_ns() const = 0;
  // Nanoseconds since 1970 (UTC); may jump when the system's time is set. For stamps that people read, not for
  // durations.
  virtual int64_t wall_ns() const = 0;

  double now_seconds() const { return static_cast<double>(now_ns()) * 1e-9; }
  double wall_seconds() const { return static_cast<double>(wall_ns()) * 1e-9; }
};

// The machine's clock. Thread-safe, stateless.
class RealClock : public Clock {
 public:
  int64_t now_ns() const override;
  int64_t wall_ns() const override;
};

// Moves only when told. Not thread-safe.
class ManualClock : public Clock {
 public:
  explicit ManualClock(int64_t start_ns = 0, int64_t wall_start_ns = 0)
      : now_(start_ns), wall_offset_(wall_start_ns - start_ns) {}
  int64_t now_ns() const override { return now_; }
  int64_t wall_ns() const override { return now_ + wall_offset_; }
  void advance_ns(int64_t by) { now_ += by; }

 private:
  int64_t now_;
  int64_t wall_offset_;
};

}  // namespace parvl
