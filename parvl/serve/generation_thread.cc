#include "parvl/serve/generation_thread.h"

#include <utility>

namespace parvl {

GenerationThread::GenerationThread(std::unique_ptr<Generator> generator)
    : generator_(std::move(generator)), thread_([this] { loop(); }) {}

GenerationThread::~GenerationThread() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  arrived_.notify_all();
  thread_.join();
}

void GenerationThread::submit(std::shared_ptr<Job> job) {
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(job));
  }
  arrived_.notify_all();
}

void GenerationThread::loop() {
  for (;;) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      arrived_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      job = std::move(waiting_.front());
      waiting_.pop_front();
    }
    job->on_end(run(*job));
  }
}

absl::StatusOr<GenerateResult> GenerationThread::run(Job& job) {
  const auto stopped = [&] { return job.cancelled || stopping_; };
  if (stopped()) return GenerateResult{};
  absl::StatusOr<GenerateResult> result = GenerateResult{};
  const absl::Status status = catch_exceptions("generation", [&]() -> absl::Status {
    result = generator_->generate(job.prompt, job.sampling, [&](const TokenEvent& event) {
      if (stopped()) return false;
      job.on_token(event);
      return true;
    });
    return result.status();
  });
  if (!status.ok()) return status;
  return result;
}

}  // namespace parvl
