#include "parvl/launch/work_watch.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

namespace parvl {
namespace {

constexpr double kStoppedS = 1;  // a thread that wakes up so much too late was stopped

}  // namespace

WorkId WorkDeadlines::begin(int64_t size, double now_s) {
  works_.emplace(next_id_, Work{size, now_s, limits_.limit_s(size)});
  return next_id_++;
}

void WorkDeadlines::end(WorkId id, double now_s) {
  const auto found = works_.find(id);
  if (found == works_.end()) return;
  limits_.took(found->second.size, now_s - found->second.since_s);
  works_.erase(found);
}

std::vector<LateWork> WorkDeadlines::look(double now_s) {
  const double late_s = now_s - next_s();
  if (late_s > kStoppedS) {
    for (auto& [id, work] : works_) work.since_s += late_s;
    return {};
  }
  std::vector<LateWork> out;
  for (auto it = works_.begin(); it != works_.end();) {
    const Work& work = it->second;
    if (work.since_s + work.limit_s > now_s) {
      ++it;
      continue;
    }
    out.push_back({work.size, work.limit_s});
    it = works_.erase(it);
  }
  return out;
}

double WorkDeadlines::next_s() const {
  double out = std::numeric_limits<double>::infinity();
  for (const auto& [id, work] : works_) out = std::min(out, work.since_s + work.limit_s);
  return out;
}

WorkWatch::WorkWatch(const Clock& clock, StepDeadline limits, std::function<void(const LateWork&)> on_late)
    : clock_(clock), on_late_(std::move(on_late)), works_(std::move(limits)), thread_([this] { loop(); }) {}

WorkWatch::~WorkWatch() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

WorkId WorkWatch::begin(int64_t size) {
  std::lock_guard lock(mutex_);
  const WorkId out = works_.begin(size, clock_.now_seconds());
  changed_.notify_all();
  return out;
}

void WorkWatch::end(WorkId id) {
  std::lock_guard lock(mutex_);
  works_.end(id, clock_.now_seconds());
}

void WorkWatch::loop() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const double wait_s = works_.next_s() - clock_.now_seconds();
    if (wait_s > 1e6) {
      changed_.wait(lock);
    } else if (wait_s > 0) {
      changed_.wait_for(lock, std::chrono::duration<double>(wait_s));
    }
    const std::vector<LateWork> late = works_.look(clock_.now_seconds());
    lock.unlock();
    for (const LateWork& work : late) on_late_(work);
    lock.lock();
  }
}

}  // namespace parvl
