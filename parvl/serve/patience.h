// What may end a request before it is done: its client, the server's shutdown, or the clock. One thread, the
// io_context's.
#pragma once

#include <memory>
#include <optional>
#include <stop_token>
#include <type_traits>
#include <utility>

#include "parvl/serve/async.h"
#include "parvl/serve/gateway.h"
#include "parvl/serve/http_connection.h"

namespace parvl {

class Patience {
 public:
  // The request is here, and its time runs. `gateway` and `connection` must outlive it.
  Patience(Gateway& gateway, HttpConnection& connection);

  // Between these two the time-out of the queue runs as well.
  void start_waiting();
  void stop_waiting() { queue_.stop(); }

  // The connection's wakeup is notified when this becomes true.
  bool over() const { return connection_.gone() || cut() || whole_.over() || queue_.over(); }
  // Once it is over and the client is still there: what to answer, counted in the metrics.
  absl::Status why();
  // Answers with that, if the client is still there; nothing may be out yet.
  asio::awaitable<void> give_up();
  // Stopped when the time is up, the server cuts what runs, or run() gave up; any thread.
  std::stop_token stop_token() const { return stop_.get_token(); }

  // Until the turn of `ticket` has come. False: it has had its answer, since it is over, or nobody is left to take it.
  asio::awaitable<bool> wait_for_turn(const Admission::Ticket& ticket);

  // Work on a thread of a pool. Destroyed before it is done, it is given up and stop_token() stopped: who does that has
  // no more use for the request.
  template <typename Work>
  class Begun {
   public:
    Begun(std::shared_ptr<PoolJob<Work>> job, std::stop_source stop) : job_(std::move(job)), stop_(std::move(stop)) {}
    Begun(Begun&&) noexcept = default;
    Begun& operator=(Begun&&) = delete;
    ~Begun() {
      if (job_ == nullptr || job_->done) return;
      stop_.request_stop();
      job_->give_up();
    }
    PoolJob<Work>& job() const { return *job_; }

   private:
    std::shared_ptr<PoolJob<Work>> job_;
    std::stop_source stop_;
  };

  // Begins `work` on a thread of `pool`. It must own what it uses, or use what outlives the pool's threads: it may go
  // on without the request.
  template <typename Work>
  Begun<Work> begin(asio::thread_pool& pool, Work work) {
    const auto job = std::make_shared<PoolJob<Work>>(std::move(work));
    // Not shared with the job: one that still waits for a thread when the server ends goes after the io_context, in
    // which the wakeup has a timer.
    const std::weak_ptr<Wakeup> waiting = connection_.wakeup();
    asio::post(pool, [job, waiting, &io = gateway_.io()] {
      if (!job->run()) return;
      asio::post(io, [job, waiting] {
        job->done = true;
        if (const auto still = waiting.lock()) still->notify();
      });
    });
    return Begun<Work>(job, stop_);
  }

  // What the work returned; none once the request is over, which stops stop_token() too.
  template <typename Work>
  asio::awaitable<std::optional<std::invoke_result_t<Work&>>> finish(Begun<Work> begun) {
    const std::shared_ptr<Wakeup> wakeup = connection_.wakeup();
    while (!begun.job().done && !over()) co_await wakeup->wait();
    if (!begun.job().done) co_return std::nullopt;
    co_return begun.job().take();
  }

  template <typename Work>
  asio::awaitable<std::optional<std::invoke_result_t<Work&>>> run(asio::thread_pool& pool, Work work) {
    return finish(begin(pool, std::move(work)));
  }

 private:
  bool cut() const { return gateway_.state() == Gateway::State::kCutting; }

  Gateway& gateway_;
  HttpConnection& connection_;
  std::stop_source stop_;
  std::stop_callback<std::function<void()>> on_cut_;
  TimeLimit whole_, queue_;
};

// The header that says after which time the queue will have moved on.
HttpConnection::Headers retry_after(const Gateway& gateway);

}  // namespace parvl
