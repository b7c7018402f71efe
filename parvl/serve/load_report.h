// From what was measured of each request to the figures of a load test. Pure.
//
// TTFT: from sending to the first text. TPOT: from there to the end, over the tokens after the first. ITL: between two
// pieces of text of one stream as they arrive. e2e: from sending to the end.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parvl/base/json.h"
#include "parvl/base/rng.h"

namespace parvl {

// One request, once it is over. Times are seconds after the start of the run.
struct LoadRecord {
  double due_s = -1;   // when it should be sent; -1: a closed loop, where nothing says when
  double sent_s = -1;  // when it was handed to the network; -1: never
  double first_text_s = 0, end_s = 0;
  int64_t prompt_tokens = 0, output_tokens = 0;  // as the server's usage says
  int64_t asked_tokens = 0;                      // of output
  std::string failure;                           // "": completed; else a kind, "HTTP 429" say
  std::string detail;                            // of the failure
  bool unfinished = false;                       // cut by the end of the run: neither completed nor failed

  bool completed() const { return failure.empty() && !unfinished; }
  double ttft_ms() const { return (first_text_s - sent_s) * 1e3; }
  double e2e_ms() const { return (end_s - sent_s) * 1e3; }
  std::optional<double> tpot_ms() const;  // of completed requests with more than one token
};

// The p-th percentile (0 to 100) of values in ascending order, between two of them by linear interpolation.
// `sorted` must not be empty.
double percentile(std::span<const double> sorted, double p);

struct Summary {
  size_t count = 0;
  double mean = 0, p50 = 0, p90 = 0, p95 = 0, p99 = 0;
};
Summary summarize(std::vector<double> values);

// At most `limit` of the values that were added, each with the same chance of being kept.
class Reservoir {
 public:
  explicit Reservoir(size_t limit = 4'000'000, uint64_t seed = 0) : limit_(limit), rng_(seed) {}
  void add(double value);
  const std::vector<double>& values() const { return values_; }

 private:
  size_t limit_;
  Rng rng_;
  uint64_t seen_ = 0;
  std::vector<double> values_;
};

// What a request must keep to count as good; 0: no bound.
struct Slo {
  double ttft_ms = 0, tpot_ms = 0;
  bool any() const { return ttft_ms > 0 || tpot_ms > 0; }
  bool met_by(const LoadRecord& record) const;  // never by one that failed; TPOT of a single token is met
};

struct LoadReport {
  struct Failure {
    int64_t count = 0;
    std::string example;
  };
  int64_t sent = 0, completed = 0, failed = 0, unfinished = 0;
  std::map<std::string, Failure> failures;                         // by kind
  double duration_s = 0;                                           // from the first sending to the last end
  int64_t prompt_tokens = 0, output_tokens = 0, asked_tokens = 0;  // of completed requests
  double requests_per_s = 0, output_tokens_per_s = 0;              // of completed requests
  Summary ttft_ms, tpot_ms, itl_ms, e2e_ms;                        // of completed requests
  Summary lateness_ms;                                             // of sending, behind the times that were planned
  Slo slo;
  double goodput_per_s = 0;   // requests that met the SLO
  double violation_rate = 0;  // share of those completed or failed that did not
};
LoadReport make_report(const std::vector<LoadRecord>& records, const Reservoir& itl_ms, const Slo& slo);

Json report_json(const LoadReport& report);
std::string report_table(const LoadReport& report);  // lines for people
Json record_json(const LoadRecord& record);

}  // namespace parvl
