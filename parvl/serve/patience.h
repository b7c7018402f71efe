// What may end a request before it is done: its client, the server's shutdown, or the clock. One thread, the
// io_context's.
#pragma once

#include <stop_token>

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
  // Stopped when the time is up, the server cuts what runs, or by stop(); any thread.
  std::stop_token stop_token() const { return stop_.get_token(); }
  void stop() { stop_.request_stop(); }

 private:
  bool cut() const { return gateway_.state() == Gateway::State::kCutting; }

  Gateway& gateway_;
  HttpConnection& connection_;
  std::stop_source stop_;
  std::stop_callback<std::function<void()>> on_cut_;
  TimeLimit whole_, queue_;
};

}  // namespace parvl
