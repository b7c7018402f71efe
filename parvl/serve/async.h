// Small pieces for Asio coroutines. Everything here runs on one thread, the io_context's, unless it says otherwise.
#pragma once

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

namespace parvl {

namespace asio = boost::asio;

// Completes with a tuple (error code, ...) instead of throwing.
inline constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);

// Lets one coroutine wait until something it cares about may have changed. A notify before the wait is not lost.
class Wakeup {
 public:
  explicit Wakeup(asio::io_context& io) : timer_(io) {}

  void notify() {
    pending_ = true;
    timer_.cancel();
  }

  asio::awaitable<void> wait() {
    if (!pending_) {
      timer_.expires_at(asio::steady_timer::time_point::max());
      co_await timer_.async_wait(kAwait);
    }
    pending_ = false;
  }

 private:
  asio::steady_timer timer_;
  bool pending_ = false;
};

// Calls `on_over` once, when a time is up. After stop(), or once it is destroyed, no more.
class TimeLimit {
 public:
  TimeLimit(asio::io_context& io, std::function<void()> on_over)
      : state_(std::make_shared<State>(State{asio::steady_timer(io), std::move(on_over)})) {}
  ~TimeLimit() { stop(); }
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;

  // From now; zero: without end.
  void start(std::chrono::milliseconds limit) {
    stop();
    if (limit.count() == 0) return;
    state_->running = true;
    state_->timer.expires_after(limit);
    state_->timer.async_wait([state = state_](const boost::system::error_code& error) {
      if (error || !std::exchange(state->running, false)) return;  // it may have been stopped after it fired
      state->over = true;
      state->on_over();
    });
  }
  void stop() {
    state_->running = false;
    state_->timer.cancel();
  }
  bool over() const { return state_->over; }

 private:
  struct State {
    asio::steady_timer timer;
    std::function<void()> on_over;
    bool running = false;
    bool over = false;
  };
  std::shared_ptr<State> state_;  // the timer's handler may come later than the destructor
};

// Work for another thread, which owns all that it uses: whoever waits for it may lose its patience, and then the work
// is not begun any more, though what has begun goes on. Thread-safe, but for `done` and take(), the io_context's.
template <typename Work>
class PoolJob {
 public:
  using Result = std::invoke_result_t<Work&>;
  explicit PoolJob(Work work) : work_(std::move(work)) {}

  // False when it was given up before it began.
  bool run() {
    std::optional<Work> work = claim();
    if (!work.has_value()) return false;
    try {
      result_.emplace((*work)());
    } catch (...) {
      exception_ = std::current_exception();
    }
    return true;
  }
  // Frees what the work holds, unless it has begun.
  void give_up() { claim(); }
  // What the work returned or threw, once it is `done`.
  Result take() {
    if (exception_) std::rethrow_exception(exception_);
    return *std::move(result_);
  }
  bool done = false;

 private:
  std::optional<Work> claim() {
    std::lock_guard lock(mutex_);
    return std::exchange(work_, std::nullopt);
  }
  std::mutex mutex_;
  std::optional<Work> work_;
  std::optional<Result> result_;
  std::exception_ptr exception_;
};

template <typename F>
asio::awaitable<std::invoke_result_t<F>> call_body(F body) {
  co_return body();
}

// Runs `body` on a thread of `pool`; the caller goes on, with what it returned, where it was. The result must have a
// default constructor.
template <typename F>
asio::awaitable<std::invoke_result_t<F>> run_on(asio::thread_pool& pool, F body) {
  co_return co_await asio::co_spawn(pool, call_body(std::move(body)), asio::use_awaitable);
}

}  // namespace parvl
