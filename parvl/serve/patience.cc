#include "parvl/serve/patience.h"

#include "parvl/serve/api_error.h"

namespace parvl {
namespace {

double seconds(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1000; }

}  // namespace

Patience::Patience(Gateway& gateway, HttpConnection& connection)
    : gateway_(gateway),
      connection_(connection),
      on_cut_(gateway.stop_token(), [this] { stop_.request_stop(); }),
      whole_(gateway.io(),
             [stop = stop_, wakeup = connection.wakeup()]() mutable {
               stop.request_stop();
               wakeup->notify();
             }),
      queue_(gateway.io(), [wakeup = connection.wakeup()] { wakeup->notify(); }) {
  whole_.start(gateway.options().request_timeout);
}

void Patience::start_waiting() { queue_.start(gateway_.options().queue_timeout); }

absl::Status Patience::why() {
  if (cut()) return api_error(503, "the server shut down before this request was finished", "draining");
  if (queue_.over()) {
    gateway_.metrics().refused(Refusal::kQueueTimeout);
    return api_error(503,
                     absl::StrCat("the request waited ", seconds(gateway_.options().queue_timeout),
                                  " s for its turn, the longest it may (--queue-timeout); try again later"),
                     "queue_timeout");
  }
  gateway_.metrics().refused(Refusal::kRequestTimeout);
  return api_error(504,
                   absl::StrCat("the request was not finished within ", seconds(gateway_.options().request_timeout),
                                " s (--request-timeout); ask for fewer tokens"),
                   "request_timeout");
}

asio::awaitable<void> Patience::give_up() {
  if (connection_.gone()) co_return;
  absl::Status status = why();
  HttpConnection::Headers headers;
  if (http_status_of(status) == 503) headers = retry_after(gateway_);
  co_await connection_.reply_error(std::move(status), std::move(headers));
}

asio::awaitable<bool> Patience::wait_for_turn(const Admission::Ticket& ticket) {
  while (!over()) {
    if (ticket.has_credit()) co_return true;
    if (absl::Status gone = gateway_.will_accept(); !gone.ok()) {
      co_await connection_.reply_error(std::move(gone));
      co_return false;
    }
    co_await connection_.wakeup()->wait();
  }
  co_await give_up();
  co_return false;
}

HttpConnection::Headers retry_after(const Gateway& gateway) {
  return {{"Retry-After", std::to_string(gateway.admission().retry_after_s())}};
}

}  // namespace parvl
