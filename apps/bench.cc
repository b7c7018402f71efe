// parvl bench: load on an OpenAI-compatible server, and how long it took to answer.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "apps/commands.h"
#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/base/log.h"
#include "parvl/base/signal.h"
#include "parvl/base/text.h"
#include "parvl/serve/load_client.h"
#include "parvl/sim/trace.h"

namespace parvl {
namespace {

constexpr int64_t kSyntheticRequests = 100;
constexpr int64_t kMaxRequests = 1'000'000;
constexpr double kLate_ms = 20;  // a client later than this is worth a warning

struct BenchFlags {
  std::string target, trace, synthetic, out, config, against;
  std::string api_key, model;
  int64_t requests = 0, concurrency = 0, max_open = 10'000;
  double rate = 0, repeat_images = 0, timeout_s = 600;
  uint64_t seed = 0;
  Slo slo;
  bool json = false;
};

absl::Status check_flags(const BenchFlags& flags) {
  if (!flags.config.empty() || !flags.against.empty()) return not_available_yet("comparing two configurations");
  if (flags.target.empty()) return invalid("--target is missing: the server's URL, http://127.0.0.1:8000 say");
  if (flags.trace.empty() == flags.synthetic.empty()) return invalid("give either --trace or --synthetic");
  if (flags.rate != 0 && flags.concurrency != 0) {
    return invalid("--rate is an open loop and --concurrency a closed one; leave one of them out");
  }
  if (!(flags.rate >= 0 && flags.rate <= 1e6)) return invalid("--rate must be above 0 requests/s, found ", flags.rate);
  for (const auto& [name, value, highest] : {std::tuple("--requests", flags.requests, kMaxRequests),
                                             std::tuple("--concurrency", flags.concurrency, kMaxRequests),
                                             std::tuple("--max-open", flags.max_open, kMaxRequests)}) {
    if (value < 0 || value > highest) return invalid(name, " must be between 1 and ", highest, ", found ", value);
  }
  if (flags.max_open == 0) return invalid("--max-open must be at least 1");
  if (!(flags.repeat_images >= 0 && flags.repeat_images <= 1)) {
    return invalid("--repeat-images is a share between 0 and 1, found ", flags.repeat_images);
  }
  if (!(flags.timeout_s > 0 && flags.timeout_s <= 1e6)) {
    return invalid("--timeout must be between 0 and 1000000 seconds, found ", flags.timeout_s);
  }
  if (!(flags.slo.ttft_ms >= 0 && flags.slo.tpot_ms >= 0)) return invalid("an SLO must be at least 0 ms (0: no bound)");
  const auto visible = [](char c) { return c > ' ' && c < 0x7f; };
  if (!std::all_of(flags.api_key.begin(), flags.api_key.end(), visible)) {
    return invalid("--api-key may hold only visible ASCII characters");
  }
  return absl::OkStatus();
}

LoadRequest load_request(const TraceRequest& request) {
  LoadRequest out;
  for (const TraceImage& image : request.images) {
    out.images.push_back({static_cast<int>(image.width), static_cast<int>(image.height)});
  }
  out.text_tokens = request.text_tokens;
  out.output_tokens = request.output_tokens;
  out.messages = request.messages;
  return out;
}

// What is sent, and when.
absl::Status make_plan(const BenchFlags& flags, LoadTestOptions& out) {
  std::vector<TraceRequest> trace;
  if (!flags.trace.empty()) {
    PARVL_ASSIGN_OR_RETURN(trace, read_trace(flags.trace));
  } else {
    const absl::StatusOr<TraceRequest> request = parse_synthetic(flags.synthetic);
    if (!request.ok()) return with_context(request.status(), "--synthetic");
    trace.push_back(*request);
  }
  const int64_t lines = flags.trace.empty() ? kSyntheticRequests : static_cast<int64_t>(trace.size());
  const size_t count = static_cast<size_t>(flags.requests > 0 ? flags.requests : lines);
  if (flags.rate > 0) {
    out.due_s = poisson_times(count, flags.rate, flags.seed);
  } else if (flags.concurrency > 0) {
    out.due_s.assign(count, 0);
  } else if (flags.trace.empty()) {
    return invalid("--synthetic does not say when requests come; add --rate or --concurrency");
  } else if (count > trace.size()) {
    return invalid("--requests ", count, " is more than the ", trace.size(), " times in ", flags.trace,
                   "; add --rate or --concurrency to go through it again");
  } else {
    for (size_t i = 0; i < count; ++i) out.due_s.push_back(trace[i].t_s);
  }
  for (const TraceRequest& request : trace) out.requests.push_back(load_request(request));
  return absl::OkStatus();
}

// Each open stream is a descriptor, and the usual limit is 1024.
void allow_many_descriptors() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

absl::Status write_records(const std::string& path, const std::vector<LoadRecord>& records) {
  std::string text;
  for (const LoadRecord& record : records) text += dump(record_json(record)) + "\n";
  return write_file_atomically(path, text);
}

void print_report(const BenchFlags& flags, const LoadResult& result, const LoadReport& report) {
  const Json tokens_per_word = result.tokens_per_word > 0 ? Json(result.tokens_per_word) : Json();
  if (flags.json) {
    Json json = report_json(report);
    json["target"] = flags.target;
    json["model"] = result.model;
    json["loop"] = flags.concurrency > 0 ? "closed" : "open";
    json["tokens_per_word"] = tokens_per_word;
    json["server"] = server_json(result.server);
    std::printf("%s\n", dump(json).c_str());
  } else {
    const std::string model = result.model.empty() ? "" : ", model " + excerpt(result.model, 200);
    std::printf("target     %s%s\n%s%s", flags.target.c_str(), model.c_str(), server_line(result.server).c_str(),
                report_table(report).c_str());
  }
  std::fflush(stdout);
  if (report.lateness_ms.count > 0 && report.lateness_ms.p99 > kLate_ms) {
    log_warning("requests were sent up to ", report.lateness_ms.p99,
                " ms late (p99): this machine cannot keep the pace, so the load was not the one asked for");
  }
}

absl::Status run_bench(const BenchFlags& flags, const Context& context) {
  PARVL_RETURN_IF_ERROR(check_flags(flags));
  const StopSignal signal;
  LoadTestOptions options;
  PARVL_ASSIGN_OR_RETURN(options.http.target, parse_target(flags.target));
  PARVL_RETURN_IF_ERROR(make_plan(flags, options));
  options.http.api_key = flags.api_key;
  options.http.timeout_s = flags.timeout_s;
  options.model = flags.model;
  options.concurrency = static_cast<size_t>(flags.concurrency);
  options.max_open = static_cast<size_t>(flags.max_open);
  options.seed = flags.seed;
  options.repeat_images = flags.repeat_images;
  options.stop_descriptor = signal.descriptor();
  allow_many_descriptors();
  PARVL_ASSIGN_OR_RETURN(const LoadResult result, run_load(std::move(options), context.clock));
  const LoadReport report = make_report(result.records, result.itl_ms, flags.slo);
  print_report(flags, result, report);
  if (!flags.out.empty()) PARVL_RETURN_IF_ERROR(write_records(flags.out, result.records));
  if (report.completed > 0) return absl::OkStatus();
  if (report.failures.empty()) return failed("no request completed before the interruption");
  const auto& [kind, failure] = *report.failures.begin();
  return failed("no request completed; ", failure.count, " failed with ", kind, ": ", failure.example);
}

}  // namespace

void add_bench_command(CLI::App& app, Context& context) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* command = app.add_subcommand("bench", "Puts load on a server and reports its latency");
  command->add_option("--target", flags->target, "The server, as http://127.0.0.1:8000");
  named(command->add_option("--trace", flags->trace, "File of a request a line, sent at its times (docs/bench.md)"));
  named(command->add_option(
      "--synthetic", flags->synthetic,
      "In place of a trace, one kind of request: images=COUNTxWIDTHxHEIGHT,text=TOKENS,output=TOKENS"));
  command->add_option("--rate", flags->rate, "Requests/s on average, at chance times, instead of the trace's times");
  command->add_option("--concurrency", flags->concurrency,
                      "So many requests always under way (a closed loop), instead of the trace's times");
  command->add_option("--requests", flags->requests,
                      "Requests to send (default: the trace's, or " + std::to_string(kSyntheticRequests) + ")");
  command->add_option("--seed", flags->seed, "Of times, texts and images")->capture_default_str();
  command->add_option("--repeat-images", flags->repeat_images, "Share of images that an earlier request had too")
      ->capture_default_str();
  command->add_option("--model", flags->model, "Model to ask for (default: the first that the server lists)");
  command->add_option("--api-key", flags->api_key, "Key to send");
  command->add_option("--slo-ttft-ms", flags->slo.ttft_ms, "Time to the first text that a good request keeps");
  command->add_option("--slo-tpot-ms", flags->slo.tpot_ms, "Time per output token that a good request keeps");
  command->add_option("--timeout", flags->timeout_s, "Seconds a request may take")->capture_default_str();
  command->add_option("--max-open", flags->max_open, "Requests under way at which an open loop fails further ones")
      ->capture_default_str();
  command->add_flag("--json", flags->json, "One JSON object");
  named(command->add_option("--out", flags->out, "File for one JSON line a request"));
  command->add_option("--config", flags->config, "Not available yet")->group("Not available yet");
  command->add_option("--against", flags->against, "Not available yet")->group("Not available yet");
  run_with(*command, context, [flags, &context] { return run_bench(*flags, context); });
}

}  // namespace parvl
