#include "parvl/serve/load_report.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "parvl/base/check.h"

namespace parvl {
namespace {

Json summary_json(const Summary& summary) {
  if (summary.count == 0) return nullptr;
  return {
      {"mean", summary.mean}, {"p50", summary.p50}, {"p90", summary.p90}, {"p95", summary.p95}, {"p99", summary.p99}};
}

std::string summary_row(const char* name, const Summary& summary) {
  if (summary.count == 0) return "";
  return absl::StrFormat("%-10s %10.2f %10.2f %10.2f %10.2f %10.2f\n", name, summary.mean, summary.p50, summary.p90,
                         summary.p95, summary.p99);
}

std::string slo_text(const Slo& slo) {
  std::string text;
  if (slo.ttft_ms > 0) absl::StrAppend(&text, "TTFT <= ", slo.ttft_ms, " ms");
  if (slo.tpot_ms > 0) absl::StrAppend(&text, text.empty() ? "" : ", ", "TPOT <= ", slo.tpot_ms, " ms");
  return text;
}

// The figures of one record into the sums.
void count_record(const LoadRecord& record, LoadReport& report) {
  report.sent += record.sent_s >= 0;
  if (record.unfinished) {
    ++report.unfinished;
  } else if (!record.failure.empty()) {
    ++report.failed;
    LoadReport::Failure& failure = report.failures[record.failure];
    if (failure.count++ == 0) failure.example = record.detail;
  } else {
    ++report.completed;
    report.prompt_tokens += record.prompt_tokens;
    report.output_tokens += record.output_tokens;
    report.asked_tokens += record.asked_tokens;
  }
}

}  // namespace

std::optional<double> LoadRecord::tpot_ms() const {
  if (!completed() || output_tokens < 2) return std::nullopt;
  return (end_s - first_text_s) * 1e3 / static_cast<double>(output_tokens - 1);
}

double percentile(std::span<const double> sorted, double p) {
  PARVL_CHECK(!sorted.empty() && p >= 0 && p <= 100, "a percentile of nothing");
  const double place = p / 100 * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], place - static_cast<double>(below));
}

Summary summarize(std::vector<double> values) {
  Summary summary;
  summary.count = values.size();
  if (values.empty()) return summary;
  std::sort(values.begin(), values.end());
  double sum = 0;
  for (const double value : values) sum += value;
  summary.mean = sum / static_cast<double>(values.size());
  summary.p50 = percentile(values, 50);
  summary.p90 = percentile(values, 90);
  summary.p95 = percentile(values, 95);
  summary.p99 = percentile(values, 99);
  return summary;
}

void Reservoir::add(double value) {
  ++seen_;
  if (values_.size() < limit_) {
    values_.push_back(value);
    return;
  }
  const uint64_t place = rng_.below(seen_);
  if (place < limit_) values_[place] = value;
}

bool Slo::met_by(const LoadRecord& record) const {
  if (!record.completed()) return false;
  const double tpot = record.tpot_ms().value_or(0);
  return (ttft_ms <= 0 || record.ttft_ms() <= ttft_ms) && (tpot_ms <= 0 || tpot <= tpot_ms);
}

LoadReport make_report(const std::vector<LoadRecord>& records, const Reservoir& itl_ms, const Slo& slo) {
  LoadReport report;
  report.slo = slo;
  std::vector<double> ttft, tpot, e2e, lateness;
  double first_s = HUGE_VAL, last_s = 0;
  int64_t good = 0;
  for (const LoadRecord& record : records) {
    count_record(record, report);
    good += slo.met_by(record);
    if (record.sent_s >= 0) {
      first_s = std::min(first_s, record.sent_s);
      last_s = std::max(last_s, record.end_s);
      if (record.due_s >= 0) lateness.push_back((record.sent_s - record.due_s) * 1e3);
    }
    if (!record.completed()) continue;
    ttft.push_back(record.ttft_ms());
    e2e.push_back(record.e2e_ms());
    if (const auto value = record.tpot_ms()) tpot.push_back(*value);
  }
  report.ttft_ms = summarize(std::move(ttft));
  report.tpot_ms = summarize(std::move(tpot));
  report.e2e_ms = summarize(std::move(e2e));
  report.itl_ms = summarize(itl_ms.values());
  report.lateness_ms = summarize(std::move(lateness));
  if (last_s > first_s) {
    report.duration_s = last_s - first_s;
    report.requests_per_s = static_cast<double>(report.completed) / report.duration_s;
    report.output_tokens_per_s = static_cast<double>(report.output_tokens) / report.duration_s;
    report.goodput_per_s = static_cast<double>(good) / report.duration_s;
  }
  const int64_t over = report.completed + report.failed;
  if (over > 0) report.violation_rate = 1 - static_cast<double>(good) / static_cast<double>(over);
  return report;
}

Json report_json(const LoadReport& report) {
  Json failures = Json::array();
  for (const auto& [kind, failure] : report.failures) {
    failures.push_back({{"reason", kind}, {"count", failure.count}, {"example", failure.example}});
  }
  Json json = {
      {"requests",
       {{"sent", report.sent},
        {"completed", report.completed},
        {"failed", report.failed},
        {"unfinished", report.unfinished},
        {"failures", std::move(failures)}}},
      {"duration_s", report.duration_s},
      {"tokens",
       {{"prompt", report.prompt_tokens}, {"output", report.output_tokens}, {"output_asked", report.asked_tokens}}},
      {"requests_per_s", report.requests_per_s},
      {"output_tokens_per_s", report.output_tokens_per_s},
      {"ttft_ms", summary_json(report.ttft_ms)},
      {"tpot_ms", summary_json(report.tpot_ms)},
      {"itl_ms", summary_json(report.itl_ms)},
      {"e2e_ms", summary_json(report.e2e_ms)},
      {"send_lateness_ms", summary_json(report.lateness_ms)},
      {"slo", nullptr},
      {"goodput_requests_per_s", nullptr},
      {"violation_rate", nullptr}};
  if (report.slo.any()) {
    json["slo"] = Json::object();
    if (report.slo.ttft_ms > 0) json["slo"]["ttft_ms"] = report.slo.ttft_ms;
    if (report.slo.tpot_ms > 0) json["slo"]["tpot_ms"] = report.slo.tpot_ms;
    json["goodput_requests_per_s"] = report.goodput_per_s;
    json["violation_rate"] = report.violation_rate;
  }
  return json;
}

std::string report_table(const LoadReport& report) {
  std::string out =
      absl::StrFormat("requests   %d sent, %d completed, %d failed", report.sent, report.completed, report.failed);
  if (report.unfinished > 0) absl::StrAppendFormat(&out, ", %d unfinished", report.unfinished);
  absl::StrAppendFormat(&out, "; %.2f s\n", report.duration_s);
  for (const auto& [kind, failure] : report.failures) {
    absl::StrAppendFormat(&out, "  failed   %d: %s (%s)\n", failure.count, kind, failure.example);
  }
  if (report.completed > 0) {
    absl::StrAppendFormat(&out, "tokens     prompt %d (%.1f a request), output %d of %d asked for\n",
                          report.prompt_tokens,
                          static_cast<double>(report.prompt_tokens) / static_cast<double>(report.completed),
                          report.output_tokens, report.asked_tokens);
    absl::StrAppendFormat(&out, "throughput %.2f requests/s, %.1f output tokens/s\n", report.requests_per_s,
                          report.output_tokens_per_s);
  }
  if (report.slo.any()) {
    absl::StrAppendFormat(&out, "SLO        %s: goodput %.2f requests/s, violations %.1f %%\n", slo_text(report.slo),
                          report.goodput_per_s, report.violation_rate * 100);
  }
  absl::StrAppendFormat(&out, "\n%-10s %10s %10s %10s %10s %10s\n", "ms", "mean", "p50", "p90", "p95", "p99");
  out += summary_row("TTFT", report.ttft_ms);
  out += summary_row("TPOT", report.tpot_ms);
  out += summary_row("ITL", report.itl_ms);
  out += summary_row("e2e", report.e2e_ms);
  out += summary_row("sent late", report.lateness_ms);
  return out;
}

Json record_json(const LoadRecord& record) {
  Json json = {{"due_s", record.due_s < 0 ? Json() : Json(record.due_s)},
               {"sent_s", record.sent_s < 0 ? Json() : Json(record.sent_s)},
               {"output_asked", record.asked_tokens}};
  if (record.completed()) {
    const auto tpot = record.tpot_ms();
    json["ttft_ms"] = record.ttft_ms();
    json["tpot_ms"] = tpot.has_value() ? Json(*tpot) : Json();
    json["e2e_ms"] = record.e2e_ms();
    json["prompt_tokens"] = record.prompt_tokens;
    json["output_tokens"] = record.output_tokens;
  } else {
    json["failure"] = record.unfinished ? "unfinished" : record.failure;
    json["detail"] = record.detail;
  }
  return json;
}

}  // namespace parvl
