#include "parvl/sched/replay_lines.h"

#include <absl/strings/str_cat.h>

#include <deque>
#include <string>
#include <utility>

namespace parvl {
namespace {

class Replay {
 public:
  explicit Replay(const ReplayedCode& code) : code_(code) {}

  // The next line, the `number`-th.
  absl::Status line(const std::string& text, int64_t number) {
    PARVL_ASSIGN_OR_RETURN(const Json json, parse_json(text, "the record"));
    if (!begun_) {
      PARVL_RETURN_IF_ERROR(code_.begin(json, [this](std::string_view line) {
        if (line.starts_with("{\"decision\"")) decisions_.emplace_back(line.substr(0, line.size() - 1));
      }));
      begun_ = true;
      return absl::OkStatus();
    }
    if (!json.is_object()) return invalid("an object was expected, found ", shown(json));
    if (!json.contains("event")) {
      compare(text, number);
      return absl::OkStatus();
    }
    ++report_.events;
    expect_no_more(number);
    return differs() ? absl::OkStatus() : code_.tell(json);
  }

  // A decision that the record leaves out before line `number` is a difference too.
  void expect_no_more(int64_t number) {
    if (decisions_.empty()) return;
    report_.differing_line = number;
    report_.recorded = "no decision";
    report_.replayed = decisions_.front();
    decisions_.clear();
  }

  bool begun() const { return begun_; }
  bool differs() const { return report_.differing_line != 0; }
  ReplayReport& report() { return report_; }

 private:
  void compare(const std::string& recorded, int64_t number) {
    ++report_.decisions;
    const std::string ours = decisions_.empty() ? "no decision" : decisions_.front();
    if (!decisions_.empty()) decisions_.pop_front();
    if (ours == recorded) return;
    report_.differing_line = number;
    report_.recorded = recorded;
    report_.replayed = ours;
  }

  const ReplayedCode& code_;
  ReplayReport report_;
  bool begun_ = false;
  std::deque<std::string> decisions_;  // made by the last event and not compared yet
};

}  // namespace

absl::StatusOr<ReplayReport> replay_lines(std::string_view record, const ReplayedCode& code) {
  Replay run(code);
  int64_t number = 0;
  for (size_t at = 0; at < record.size();) {
    const size_t end = record.find('\n', at);
    run.report().cut = end == std::string_view::npos;
    if (run.report().cut) break;
    const std::string text(record.substr(at, end - at));
    at = end + 1;
    ++number;
    absl::Status status;
    const std::string name = absl::StrCat("line ", number);
    const absl::Status thrown = catch_exceptions(name, [&] {
      status = run.line(text, number);
      return absl::OkStatus();
    });
    if (!thrown.ok()) return invalid(thrown.message());
    if (!status.ok()) return with_context(status, name);
    if (run.differs()) return run.report();  // what follows makes no sense to code that went elsewhere
  }
  if (!run.begun()) return invalid("the record is empty");
  if (!run.report().cut) run.expect_no_more(number + 1);
  return run.report();
}

}  // namespace parvl
