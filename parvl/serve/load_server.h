// What a server's own /metrics say of a load test: how busy its modules were, and what its gateway cost. Pure.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "parvl/base/json.h"

namespace parvl {

// The samples of a page in the Prometheus text format, by name and labels as they are written: `a_total{b="c"}`. Lines
// that are no samples are left out.
using MetricsPage = std::map<std::string, double>;
MetricsPage parse_metrics(std::string_view text);
// The value of a label in such a key; "" when it has none. Escapes stay as they are.
std::string label_of(const std::string& sample, const std::string& label);

// Between two pages. A server that does not show parvl's names has none of it.
struct ServerFigures {
  std::map<std::string, double> busy;                      // by POOL/MODULE: the share of the time that it computed
  std::optional<double> overhead_p50_ms, overhead_p99_ms;  // of the gateway, of the requests in between
};
ServerFigures compare(const MetricsPage& before, const MetricsPage& after, double seconds);

Json server_json(const ServerFigures& figures);         // null without any
std::string server_line(const ServerFigures& figures);  // for people; "" without any

}  // namespace parvl
