// Small pieces for Asio coroutines. Everything here runs on one thread, the io_context's, unless it says otherwise.
#pragma once

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
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
