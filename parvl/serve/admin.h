// What the admin port answers: the status of all instances, the dashboard page, and operations on instances. One
// thread, the io_context's.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "parvl/base/clock.h"
#include "parvl/serve/bearer_keys.h"
#include "parvl/serve/fleet_view.h"
#include "parvl/serve/gateway.h"
#include "parvl/serve/http_connection.h"
#include "parvl/serve/options.h"
#include "parvl/serve/recent.h"

namespace parvl {

// The limits of its connections: few, with small bodies.
HttpLimits admin_limits();

class Admin : public HttpHandler {
 public:
  // All must outlive it; the gateway's options have an admin port and a fleet.
  Admin(asio::io_context& io, Gateway& gateway, const Clock& clock);

  // Looks at the fleet every so often, so that shares of a window can be told. Ends with the io_context.
  asio::awaitable<void> watch_fleet();

  absl::Status check(const HttpConnection& connection) override;
  asio::awaitable<void> handle(HttpConnection& connection) override;
  std::string new_request_id() override { return gateway_.new_request_id(); }
  std::string allowed_methods(std::string_view path) const override;
  void finished(const HttpConnection&, int) override {}

 private:
  absl::Status check_token(const HttpConnection& connection) const;
  absl::Status check_origin(const HttpConnection& connection) const;
  asio::awaitable<void> reply_status(HttpConnection& connection);
  asio::awaitable<void> reply_dashboard(HttpConnection& connection);
  asio::awaitable<void> drain(HttpConnection& connection);

  asio::io_context& io_;
  Gateway& gateway_;
  const Clock& clock_;
  const AdminOptions& options_;
  FleetView& fleet_;
  std::vector<std::string> roles_;  // of the keys
  BearerKeys keys_;
  const double started_s_;
  BusyShare busy_;
};

}  // namespace parvl
