#include "parvl/serve/admin.h"

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include <algorithm>
#include <boost/asio/ip/address.hpp>
#include <cmath>
#include <utility>

#include "parvl/base/log.h"
#include "parvl/base/text.h"
#include "parvl/serve/api_error.h"
#include "parvl/serve/dashboard.h"
#include "parvl/serve/fleet_status.h"

namespace parvl {
namespace {

constexpr double kLooksAWindow = 20, kLongestLook_s = 0.5;
constexpr size_t kConnections = 64, kBodyBytes = 64u << 10;

constexpr char kGet[] = "GET, HEAD, OPTIONS";
constexpr char kPost[] = "POST, OPTIONS";
struct AdminRoute {
  std::string_view path;
  const char* methods;
  bool open = false;  // to who has no token: they tell nothing
  bool built = true;
};
constexpr AdminRoute kAdminRoutes[] = {{"/", kGet, true},
                                       {"/livez", kGet, true},
                                       {"/status", kGet},
                                       {"/drain", kPost},
                                       {"/audit", kGet, false, false},
                                       {"/scale", kPost, false, false},
                                       {"/lend", kPost, false, false},
                                       {"/resize", kPost, false, false},
                                       {"/apply", kPost, false, false},
                                       {"/approve", kPost, false, false},
                                       {"/reject", kPost, false, false},
                                       {"/rollback", kPost, false, false}};

const AdminRoute* route_of(std::string_view path) {
  const auto* found = std::find_if(std::begin(kAdminRoutes), std::end(kAdminRoutes),
                                   [&](const AdminRoute& route) { return route.path == path; });
  return found == std::end(kAdminRoutes) ? nullptr : found;
}

std::vector<std::string> names_of(const std::map<std::string, std::string>& tokens) {
  std::vector<std::string> names;
  for (const auto& [role, token] : tokens) names.push_back(role);
  return names;
}

std::vector<std::string> secrets_of(const std::map<std::string, std::string>& tokens) {
  std::vector<std::string> secrets;
  for (const auto& [role, token] : tokens) secrets.push_back(token);
  return secrets;
}

// HOST of a Host header's HOST:PORT.
std::string_view host_of(std::string_view header) {
  if (header.starts_with('[')) return header.substr(1, std::min(header.find(']'), header.size()) - 1);
  return header.substr(0, header.find(':'));
}

bool serves(InstanceState state) { return state == InstanceState::kReady || state == InstanceState::kDraining; }

}  // namespace

HttpLimits admin_limits() {
  HttpLimits limits;
  limits.connections = kConnections;
  limits.body_bytes = kBodyBytes;
  return limits;
}

Admin::Admin(asio::io_context& io, Gateway& gateway, const Clock& clock)
    : io_(io),
      gateway_(gateway),
      clock_(clock),
      options_(*gateway.options().admin),
      fleet_(*gateway.options().fleet),
      roles_(names_of(options_.tokens)),
      keys_(secrets_of(options_.tokens)),
      started_s_(clock.now_seconds()),
      busy_(options_.window_s) {}

asio::awaitable<void> Admin::watch_fleet() {
  const double pause_s = std::min(options_.window_s / kLooksAWindow, kLongestLook_s);
  asio::steady_timer timer(io_);
  for (;;) {
    std::vector<BusyShare::Reading> readings;
    for (const InstanceInfo& instance : fleet_.instances()) {
      readings.push_back({instance.id, instance.epoch, instance.pool, serves(instance.state),
                          instance.stats.backbone_busy_s + instance.stats.encoder_busy_s});
    }
    busy_.take(clock_.now_seconds(), readings);
    timer.expires_after(std::chrono::milliseconds(std::max(10L, std::lround(pause_s * 1000))));
    co_await timer.async_wait(kAwait);
  }
}

// Reading takes a token of any role; an operation one of who operates, or of who approves what others do.
absl::Status Admin::check_token(const HttpConnection& connection) const {
  if (keys_.empty()) return absl::OkStatus();
  const auto found = keys_.find(connection.header("Authorization"));
  if (!found.has_value()) {
    return api_error(401,
                     BearerKeys::is_bearer(connection.header("Authorization"))
                         ? "the admin token is not valid"
                         : "an admin token is needed: `Authorization: Bearer TOKEN`",
                     "invalid_admin_token");
  }
  if (connection.method() == http::verb::post && roles_[*found] == "viewer") {
    return api_error(403, "the token of the role viewer may only read; this needs the operator's", "role_not_allowed");
  }
  return absl::OkStatus();
}

// A page of another site must neither read (it may have a name that resolves to this machine) nor operate from the
// browser of somebody who can reach this port.
absl::Status Admin::check_origin(const HttpConnection& connection) const {
  const std::string_view host = connection.header("Host"), origin = connection.header("Origin");
  boost::system::error_code error;
  asio::ip::make_address(std::string(host_of(host)), error);
  if (keys_.empty() && !host.empty() && host_of(host) != "localhost" && error) {
    return api_error(403,
                     absl::StrCat("without admin.tokens this port answers only when asked by address or as localhost, ",
                                  "not as ", excerpt(host)),
                     "host_not_allowed");
  }
  if (!origin.empty() && origin != absl::StrCat("http://", std::string(host))) {
    return api_error(403, absl::StrCat("requests of pages of ", excerpt(origin), " are not answered"),
                     "origin_not_allowed");
  }
  return absl::OkStatus();
}

std::string Admin::allowed_methods(std::string_view path) const {
  const AdminRoute* route = route_of(path);
  return route == nullptr ? "" : route->methods;
}

absl::Status Admin::check(const HttpConnection& connection) {
  PARVL_RETURN_IF_ERROR(check_origin(connection));
  const AdminRoute* route = route_of(connection.path());
  if (route == nullptr || !route->open) PARVL_RETURN_IF_ERROR(check_token(connection));
  if (route == nullptr) {
    return api_error(404, absl::StrCat("there is no route ", excerpt(connection.path()), " on the admin port"),
                     "route_not_found");
  }
  const std::vector<std::string> methods = absl::StrSplit(route->methods, ", ");
  const auto name = http::to_string(connection.method());
  if (std::find(methods.begin(), methods.end(), std::string(name.data(), name.size())) == methods.end()) {
    return api_error(405, absl::StrCat(std::string(route->path), " answers ", methods.front(), " only"),
                     "method_not_allowed");
  }
  if (!route->built) return not_available_yet(absl::StrCat(std::string(route->path), " of the admin port"));
  return absl::OkStatus();
}

asio::awaitable<void> Admin::handle(HttpConnection& connection) {
  if (connection.method() == http::verb::options) {
    co_await connection.reply_methods();
  } else if (connection.path() == "/livez") {
    co_await connection.reply(200, R"({"status":"ok"})");
  } else if (connection.path() == "/status") {
    co_await reply_status(connection);
  } else if (connection.path() == "/drain") {
    co_await drain(connection);
  } else {
    co_await reply_dashboard(connection);
  }
}

asio::awaitable<void> Admin::reply_status(HttpConnection& connection) {
  const double now_s = clock_.now_seconds(), from_s = now_s - options_.window_s;
  const ServeOptions& serve = gateway_.options();
  const Metrics::Recent& recent = gateway_.metrics().recent();
  const FleetStatus status = {fleet_.pools(),
                              fleet_.instances(),
                              fleet_.parked(),
                              busy_,
                              {serve.version, serve.served_names.front(), now_s - started_s_, gateway_.health(),
                               static_cast<int64_t>(gateway_.admission().in_line())},
                              {options_.window_s, recent.ttft_s.since(from_s), recent.tpot_s.since(from_s)}};
  std::string body = dump_json(status_json(status));
  HttpConnection::Headers headers;
  headers["Cache-Control"] = "no-store";
  co_await connection.reply(200, std::move(body), std::move(headers));
}

asio::awaitable<void> Admin::reply_dashboard(HttpConnection& connection) {
  HttpConnection::Headers headers;
  headers["Content-Type"] = "text/html; charset=utf-8";
  headers["Content-Security-Policy"] = dashboard_policy();
  headers["X-Content-Type-Options"] = "nosniff";
  headers["Referrer-Policy"] = "no-referrer";
  headers["Cache-Control"] = "no-cache";
  co_await connection.reply(200, std::string(kDashboardPage), std::move(headers));
}

asio::awaitable<void> Admin::drain(HttpConnection& connection) {
  int64_t instance = -1;
  const std::string_view query = connection.query();
  constexpr std::string_view kName = "instance=";
  if (!query.starts_with(kName) || !absl::SimpleAtoi(std::string(query.substr(kName.size())), &instance)) {
    co_return co_await connection.reply_error(
        api_error(400, "say which instance: POST /drain?instance=N", "", "instance"));
  }
  absl::Status status = fleet_.drain(instance);
  if (absl::IsFailedPrecondition(status)) {
    status = api_error(409, std::string(status.message()), "instance_state", "instance");
  }
  if (!status.ok()) co_return co_await connection.reply_error(with_field(std::move(status), "instance"));
  log_info("the admin port was asked to drain instance ", instance);
  const Json reply = {{"instance", instance}, {"state", "draining"}};
  co_await connection.reply(200, dump_json(reply));
}

}  // namespace parvl
