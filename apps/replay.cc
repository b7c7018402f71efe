// parvl replay: a recorded run's events through the deciding code once more.
#include <cstdio>
#include <memory>
#include <string>

#include "apps/commands.h"
#include "parvl/base/file.h"
#include "parvl/base/json.h"
#include "parvl/base/text.h"
#include "parvl/elastic/fleet_record.h"
#include "parvl/sched/record.h"

namespace parvl {
namespace {

struct ReplayFlags {
  std::string file;
  bool json = false;
};

absl::Status run_replay(const ReplayFlags& flags) {
  PARVL_ASSIGN_OR_RETURN(const std::string record, read_file(flags.file, size_t{16} << 30));
  const absl::StatusOr<ReplayReport> report = is_fleet_record(record) ? replay_fleet(record) : replay(record);
  if (!report.ok()) return with_context(report.status(), flags.file);
  const bool equal = report->differing_line == 0;
  if (flags.json) {
    const Json json = {{"events", report->events},
                       {"decisions", report->decisions},
                       {"equal", equal},
                       {"cut", report->cut},
                       {"differing_line", equal ? Json() : Json(report->differing_line)}};
    std::printf("%s\n", json.dump().c_str());
  } else if (equal) {
    std::printf("%lld events, %lld decisions, all as recorded%s\n", static_cast<long long>(report->events),
                static_cast<long long>(report->decisions),
                report->cut ? "; the last line was not written whole and is left out" : "");
  } else {
    std::printf("recorded: %s\nreplayed: %s\n", report->recorded.c_str(), report->replayed.c_str());
  }
  if (equal) return absl::OkStatus();
  return failed(flags.file, ": the decision in line ", report->differing_line, " comes out differently");
}

}  // namespace

void add_replay_command(CLI::App& app, Context& context) {
  auto flags = std::make_shared<ReplayFlags>();
  CLI::App* command = app.add_subcommand("replay", "Checks a recorded run's decisions");
  named(command->add_option("file", flags->file, "What `parvl serve --record FILE` wrote"))->required();
  command->add_flag("--json", flags->json, "One JSON object: events, decisions, equal, cut, differing_line");
  run_with(*command, context, [flags] { return run_replay(*flags); });
}

}  // namespace parvl
