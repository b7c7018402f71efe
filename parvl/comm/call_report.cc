#include "parvl/comm/call_report.h"

#include <absl/strings/numbers.h>

#include <algorithm>

#include "parvl/base/json.h"

namespace parvl {
namespace {

Json to_json(const CallRecord& call) {
  Json out = {static_cast<int>(call.kind),
              static_cast<int>(call.dtype),
              static_cast<int>(call.reduce),
              call.count,
              call.peer,
              call.index,
              call.before,
              call.begun_ns,
              call.ended_ns,
              call.site};
  if (call.kind == CallKind::kAllToAll) out.insert(out.end(), {Json(call.sent), Json(call.awaited)});
  return out;
}

CallRecord call_from(const Json& json) {
  CallRecord out;
  out.kind = static_cast<CallKind>(json.at(0).get<int>());
  out.dtype = static_cast<DType>(json.at(1).get<int>());
  out.reduce = static_cast<ReduceOp>(json.at(2).get<int>());
  out.count = json.at(3).get<int64_t>();
  out.peer = json.at(4).get<int64_t>();
  out.index = json.at(5).get<int64_t>();
  out.before = json.at(6).get<uint64_t>();
  out.begun_ns = json.at(7).get<int64_t>();
  out.ended_ns = json.at(8).get<int64_t>();
  out.site = json.at(9).get<std::string>();
  if (out.kind == CallKind::kAllToAll) {
    out.sent = json.at(10).get<std::vector<int64_t>>();
    out.awaited = json.at(11).get<std::vector<int64_t>>();
  }
  return out;
}

Json to_json(const GroupReport& group) {
  Json calls = Json::array();
  for (const CallRecord& call : group.calls) calls.push_back(to_json(call));
  return {{"name", group.group.name}, {"ranks", group.group.ranks}, {"collectives", group.collectives},
          {"sent", group.sent},       {"received", group.received}, {"hash", group.hash},
          {"calls", std::move(calls)}};
}

GroupReport group_from(const Json& json) {
  GroupReport out;
  out.group.name = json.at("name").get<std::string>();
  out.group.ranks = json.at("ranks").get<std::vector<int64_t>>();
  out.collectives = json.at("collectives").get<int64_t>();
  out.sent = json.at("sent").get<std::vector<int64_t>>();
  out.received = json.at("received").get<std::vector<int64_t>>();
  out.hash = json.at("hash").get<uint64_t>();
  for (const Json& call : json.at("calls")) out.calls.push_back(call_from(call));
  return out;
}

}  // namespace

const GroupReport* RankReport::find(const std::string& group) const {
  const auto found =
      std::find_if(groups.begin(), groups.end(), [&](const GroupReport& g) { return g.group.name == group; });
  return found == groups.end() ? nullptr : &*found;
}

GroupReport report_of(const CallLog& log, size_t calls) {
  GroupReport out;
  out.group = log.group();
  out.collectives = log.collectives();
  for (size_t i = 0; i < out.group.ranks.size(); ++i) {
    out.sent.push_back(log.sent(i));
    out.received.push_back(log.received(i));
  }
  out.hash = log.hash();
  out.calls = log.tail(calls);
  return out;
}

std::string to_text(const RankReport& report) {
  Json out = {{"rank", report.rank}, {"number", report.number}, {"left", report.has_left}, {"groups", Json::array()}};
  for (const GroupReport& group : report.groups) out["groups"].push_back(to_json(group));
  if (report.waiting.has_value()) {
    out["waiting"] = {report.waiting->group, to_json(report.waiting->call), report.waiting->seconds};
  }
  return out.dump();
}

absl::StatusOr<RankReport> parse_report(const std::string& text) {
  RankReport out;
  PARVL_ASSIGN_OR_RETURN(const Json json, parse_json(text, "a rank's report"));
  PARVL_RETURN_IF_ERROR(catch_exceptions("a rank's report", [&] {
    out.rank = json.at("rank").get<int64_t>();
    out.number = json.at("number").get<int64_t>();
    out.has_left = json.at("left").get<bool>();
    for (const Json& group : json.at("groups")) out.groups.push_back(group_from(group));
    if (json.contains("waiting")) {
      const Json& waiting = json["waiting"];
      out.waiting = {waiting.at(0).get<std::string>(), call_from(waiting.at(1)), waiting.at(2).get<double>()};
    }
    return absl::OkStatus();
  }));
  return out;
}

std::string to_text(const absl::Status& error) {
  return absl::StrCat(static_cast<int>(error.code()), " ", error.message());
}

absl::Status parse_status(const std::string& text) {
  const size_t blank = text.find(' ');
  int code = 0;
  if (blank == std::string::npos || !absl::SimpleAtoi(text.substr(0, blank), &code) || code <= 0) {
    return absl::InternalError("another rank has failed");
  }
  return absl::Status(static_cast<absl::StatusCode>(code), text.substr(blank + 1));
}

}  // namespace parvl
