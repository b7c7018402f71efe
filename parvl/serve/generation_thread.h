// The thread that owns the generator: one request after another.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "parvl/base/status.h"
#include "parvl/exec/generator.h"

namespace parvl {

class GenerationThread {
 public:
  struct Job {
    Prompt prompt;
    SamplingParams sampling;
    std::atomic<bool> cancelled{false};                                 // set from any thread: ends at the next token
    std::function<void(const TokenEvent&)> on_token;                    // on the generation thread
    std::function<void(const absl::StatusOr<GenerateResult>&)> on_end;  // there too, exactly once, also when cancelled
  };

  explicit GenerationThread(std::unique_ptr<Generator> generator);
  // Cancels what runs and what waits, and joins; every job has ended.
  ~GenerationThread();

  // Any thread. How many wait is bounded by the caller (Admission's credits).
  void submit(std::shared_ptr<Job> job);
  const Generator& generator() const { return *generator_; }  // its const parts only: they are thread-safe

 private:
  void loop();
  absl::StatusOr<GenerateResult> run(Job& job);

  std::unique_ptr<Generator> generator_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::shared_ptr<Job>> waiting_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace parvl
