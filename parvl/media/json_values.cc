#include "parvl/media/json_values.h"

#include <absl/strings/str_cat.h>

#include <algorithm>
#include <cmath>

namespace parvl {
namespace {

constexpr double kDecimal = 1e-6;               // the smallest step between numbers that are written
constexpr double kMaxWhole = 9007199254740992;  // 2^53: up to here a double holds every whole number

constexpr char kDate[] =
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))|"
    "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)";
constexpr char kTime[] =
    "T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
constexpr char kOctet[] = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";

// How many steps a bound is; what is a whole number of them but for rounding is that number.
double steps_of(double bound, double step) {
  const double steps = bound / step, near = std::round(steps);
  return std::abs(steps - near) <= 1e-9 * std::max(1.0, std::abs(steps)) ? near : steps;
}

}  // namespace

std::string exact_pattern(std::string_view format) {
  if (format == "date") return kDate;
  if (format == "date-time") return absl::StrCat(kDate, kTime);
  if (format == "ipv4") return absl::StrCat("(", kOctet, "\\.){3}", kOctet);
  return "";
}

absl::Status check_range(const OrderedJson& schema, bool whole) {
  const double step = whole ? 1 : kDecimal;
  double first = -INFINITY, last = INFINITY;  // steps within the bounds
  for (const std::string word : {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}) {
    const auto found = schema.find(word);
    if (found == schema.end()) continue;
    const double bound = found->get<double>();
    if (whole && !(std::abs(bound) <= kMaxWhole)) {
      return invalid("'", word, "' of whole numbers must be within ±2^53, found ", bound);
    }
    const double steps = steps_of(bound, step);
    if (word == "minimum") first = std::max(first, std::ceil(steps));
    if (word == "exclusiveMinimum") first = std::max(first, std::floor(steps) + 1);
    if (word == "maximum") last = std::min(last, std::floor(steps));
    if (word == "exclusiveMaximum") last = std::min(last, std::ceil(steps) - 1);
  }
  if (first <= last) return absl::OkStatus();
  return invalid(whole ? "its range holds no whole number; widen it"
                       : "its range holds no number of at most six decimals; widen it");
}

}  // namespace parvl
