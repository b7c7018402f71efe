#include "parvl/serve/dashboard.h"

#include <absl/strings/escaping.h>
#include <absl/strings/str_cat.h>

#include "parvl/base/check.h"
#include "parvl/base/file.h"

namespace parvl {
namespace {

// As the policy names what stands between <TAG> and </TAG>.
std::string hash_of(const std::string& tag) {
  const std::string begin = "<" + tag + ">";
  const size_t from = kDashboardPage.find(begin), to = kDashboardPage.find("</" + tag + ">");
  PARVL_CHECK(from != std::string_view::npos && to != std::string_view::npos,
              "the dashboard lacks its style or script");
  const std::string_view inside = kDashboardPage.substr(from + begin.size(), to - from - begin.size());
  return absl::StrCat("'sha256-", absl::Base64Escape(absl::HexStringToBytes(sha256_hex(inside))), "'");
}

}  // namespace

std::string dashboard_policy() {
  return absl::StrCat("default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; ",
                      "frame-ancestors 'none'; style-src ", hash_of("style"), "; script-src ", hash_of("script"));
}

}  // namespace parvl
