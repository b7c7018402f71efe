#include "parvl/serve/load_server.h"

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include <cmath>
#include <cstdlib>

namespace parvl {
namespace {

constexpr char kBusy[] = "parvl_busy_seconds_total{";
constexpr char kOverhead[] = "parvl_gateway_overhead_seconds_bucket{";

double increase(const std::string& sample, double value, const MetricsPage& before) {
  const auto was = before.find(sample);
  return value - (was == before.end() ? 0 : was->second);
}

// How many requests came between the pages, by the upper bound of their bucket in seconds; each bucket holds those
// before it.
std::map<double, double> overhead_buckets(const MetricsPage& before, const MetricsPage& after) {
  std::map<double, double> counts;
  for (const auto& [sample, value] : after) {
    if (!sample.starts_with(kOverhead)) continue;
    const std::string bound = label_of(sample, "le");
    counts[bound == "+Inf" ? HUGE_VAL : std::strtod(bound.c_str(), nullptr)] += increase(sample, value, before);
  }
  return counts;
}

// As Prometheus does: within a bucket by linear interpolation; over the last bound, that bound.
std::optional<double> quantile(const std::map<double, double>& buckets, double share) {
  if (buckets.empty() || buckets.rbegin()->second <= 0) return std::nullopt;
  const double rank = share * buckets.rbegin()->second;
  double bound_below = 0, count_below = 0;
  for (const auto& [bound, count] : buckets) {
    if (count >= rank && std::isfinite(bound)) {
      const double within = count > count_below ? (rank - count_below) / (count - count_below) : 0;
      return bound_below + (bound - bound_below) * within;
    }
    if (std::isfinite(bound)) bound_below = bound;
    count_below = count;
  }
  return bound_below;
}

}  // namespace

MetricsPage parse_metrics(std::string_view text) {
  MetricsPage page;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    const size_t space = line.rfind(' ');
    if (line.starts_with('#') || space == std::string_view::npos) continue;
    double value = 0;
    if (!absl::SimpleAtod(std::string(line.substr(space + 1)), &value)) continue;
    page[std::string(line.substr(0, space))] = value;
  }
  return page;
}

std::string label_of(const std::string& sample, const std::string& label) {
  for (const char* mark : {"{", ","}) {
    const std::string start = absl::StrCat(mark, label, "=\"");
    const size_t at = sample.find(start);
    if (at == std::string::npos) continue;
    const size_t begin = at + start.size();
    return sample.substr(begin, sample.find('"', begin) - begin);
  }
  return "";
}

ServerFigures compare(const MetricsPage& before, const MetricsPage& after, double seconds) {
  ServerFigures figures;
  if (seconds <= 0) return figures;
  for (const auto& [sample, value] : after) {
    if (!sample.starts_with(kBusy)) continue;
    const std::string module = absl::StrCat(label_of(sample, "pool"), "/", label_of(sample, "module"));
    figures.busy[module] += increase(sample, value, before) / seconds;
  }
  const std::map<double, double> buckets = overhead_buckets(before, after);
  const auto ms = [&buckets](double share) {
    const auto value = quantile(buckets, share);
    return value.has_value() ? std::optional<double>(*value * 1e3) : std::nullopt;
  };
  figures.overhead_p50_ms = ms(0.5);
  figures.overhead_p99_ms = ms(0.99);
  return figures;
}

Json server_json(const ServerFigures& figures) {
  if (figures.busy.empty()) return nullptr;
  Json overhead;
  if (figures.overhead_p50_ms) overhead = {{"p50", *figures.overhead_p50_ms}, {"p99", *figures.overhead_p99_ms}};
  return {{"busy", figures.busy}, {"gateway_overhead_ms", overhead}};
}

std::string server_line(const ServerFigures& figures) {
  if (figures.busy.empty()) return "";
  std::string line = "server     busy:";
  const char* separator = " ";
  for (const auto& [module, share] : figures.busy) {
    absl::StrAppendFormat(&line, "%s%s %.1f %%", separator, module, share * 100);
    separator = ", ";
  }
  if (figures.overhead_p50_ms) {
    absl::StrAppendFormat(&line, "; gateway's own time a request: p50 %.2f ms, p99 %.2f ms", *figures.overhead_p50_ms,
                          *figures.overhead_p99_ms);
  }
  return line + "\n";
}

}  // namespace parvl
