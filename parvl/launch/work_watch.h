// Work that other processes were asked for and may never do: each piece has a limit by how long pieces of its size have
// taken, and who is over it is told of.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/elastic/step_deadline.h"

namespace parvl {

using WorkId = int64_t;

struct LateWork {
  int64_t size = 0;
  double limit_s = 0;
};

// What is under way, and what is late. Times are seconds of a clock. Pure; not thread-safe.
class WorkDeadlines {
 public:
  explicit WorkDeadlines(StepDeadline limits) : limits_(std::move(limits)) {}

  WorkId begin(int64_t size, double now_s);
  void end(WorkId id, double now_s);  // of one that was late: no effect
  // What has become late, each once. Nobody looked since `next_s` although that has long passed: this process was
  // stopped itself, and everybody gets that time again.
  std::vector<LateWork> look(double now_s);
  // When to look again; infinity: when there is something.
  double next_s() const;

 private:
  struct Work {
    int64_t size = 0;
    double since_s = 0, limit_s = 0;
  };
  StepDeadline limits_;
  std::map<WorkId, Work> works_;
  WorkId next_id_ = 0;
};

class WorkWatch {
 public:
  // `on_late`: on a thread of the watch. The clock outlives this.
  WorkWatch(const Clock& clock, StepDeadline limits, std::function<void(const LateWork&)> on_late);
  ~WorkWatch();

  // Any thread.
  WorkId begin(int64_t size);
  void end(WorkId id);

 private:
  void loop();

  const Clock& clock_;
  const std::function<void(const LateWork&)> on_late_;
  std::mutex mutex_;
  std::condition_variable changed_;
  WorkDeadlines works_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace parvl
