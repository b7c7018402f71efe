// The dashboard page of the admin port: dashboard.html, as the build put it into the program.
#pragma once

#include <string>
#include <string_view>

namespace parvl {

extern const std::string_view kDashboardPage;

// The page's Content-Security-Policy: its own style and script, and requests to where it came from; nothing else.
std::string dashboard_policy();

}  // namespace parvl
