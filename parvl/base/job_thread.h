// A thread that runs jobs in order.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace parvl {

// Runs jobs one after another on its own thread. The destructor waits for the job that runs; what
// waits behind it is dropped.
class JobThread {
 public:
  JobThread() : thread_([this] { loop(); }) {}
  ~JobThread() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    arrived_.notify_one();
    thread_.join();
  }
  // A job that throws must come through `run`.
  void submit(std::function<void()> job) {
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    arrived_.notify_one();
  }

  // The same; the future hears of the job's end, or of what it threw.
  std::future<void> run(std::function<void()> job) {
    auto task = std::make_shared<std::packaged_task<void()>>(std::move(job));
    submit([task] { (*task)(); });
    return task->get_future();
  }

 private:
  void loop() {
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock lock(mutex_);
        arrived_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
        if (stopping_) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job();
    }
  }
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::function<void()>> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace parvl
