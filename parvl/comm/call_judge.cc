#include "parvl/comm/call_judge.h"

#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>

#include <algorithm>
#include <utility>

namespace parvl {
namespace {

using Members = std::vector<std::pair<int64_t, const GroupReport*>>;  // rank in the world, its report of one group

std::map<std::string, Members> by_group(const RankReports& reports) {
  std::map<std::string, Members> out;
  for (const auto& [rank, report] : reports) {
    for (const GroupReport& group : report.groups) out[group.group.name].push_back({rank, &group});
  }
  return out;
}

using Calls = std::vector<std::pair<int64_t, const CallRecord*>>;  // rank, what it called at one place

// "rank 1 called X, ranks 0, 2 called Y": what few called before what most did.
std::string unlike_calls(const Calls& calls) {
  std::vector<std::pair<const CallRecord*, std::vector<int64_t>>> kinds;
  for (const auto& [rank, call] : calls) {
    const auto found = std::find_if(kinds.begin(), kinds.end(),
                                    [&, c = call](const auto& kind) { return same_call(*kind.first, *c); });
    if (found == kinds.end()) {
      kinds.push_back({call, {rank}});
    } else {
      found->second.push_back(rank);
    }
  }
  std::stable_sort(kinds.begin(), kinds.end(),
                   [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  std::vector<std::string> parts;
  for (const auto& [call, ranks] : kinds) parts.push_back(absl::StrCat(rank_list(ranks), " called ", call->text()));
  return absl::StrJoin(parts, ", ");
}

// Of an all_to_all that all have called: a part that is sent as so many values and awaited as so many others.
std::string unlike_parts(const GroupSpec& group, const Calls& calls) {
  for (const auto& [from, source] : calls) {
    for (const auto& [to, target] : calls) {
      const auto place = [&](int64_t rank) {
        return static_cast<size_t>(std::find(group.ranks.begin(), group.ranks.end(), rank) - group.ranks.begin());
      };
      const int64_t sent = source->sent[place(to)], awaited = target->awaited[place(from)];
      if (sent == awaited) continue;
      return absl::StrCat("in ", source->text(), ", rank ", from, " sends ", sent, " values to rank ", to,
                          ", which awaits ", awaited);
    }
  }
  return "";
}

constexpr const char* kSameCalls = "; all ranks of a group must make the same calls in the same order";

absl::Status collectives_differ(const std::string& name, const Members& members) {
  std::map<int64_t, Calls> places;
  for (const auto& [rank, group] : members) {
    for (const CallRecord& call : group->calls) {
      if (!call.is_message()) places[call.index].push_back({rank, &call});
    }
  }
  for (const auto& [index, calls] : places) {
    const auto differs = [&, first = calls[0].second](const auto& other) { return !same_call(*first, *other.second); };
    if (std::any_of(calls.begin(), calls.end(), differs)) {
      return invalid("group ", name, ", call ", index, ": ", unlike_calls(calls), kSameCalls);
    }
    for (const auto& [rank, call] : calls) {
      if (call->before == calls[0].second->before) continue;
      return invalid("group ", name, ": the calls of rank ", rank, " and rank ", calls[0].first,
                     " differ somewhere before call ", index, ", the oldest that both remember", kSameCalls);
    }
    if (calls[0].second->kind != CallKind::kAllToAll) continue;
    const std::string parts = unlike_parts(members[0].second->group, calls);
    if (!parts.empty()) return invalid("group ", name, ", call ", index, ": ", parts);
  }
  return absl::OkStatus();
}

absl::Status messages_differ(const std::string& name, const Members& members) {
  for (const auto& [from, sender] : members) {
    for (const auto& [to, receiver] : members) {
      std::map<int64_t, const CallRecord*> sent;
      for (const CallRecord& call : sender->calls) {
        if (call.kind == CallKind::kSend && call.peer == to) sent[call.index] = &call;
      }
      for (const CallRecord& call : receiver->calls) {
        if (call.kind != CallKind::kReceive || call.peer != from || sent.count(call.index) == 0) continue;
        const CallRecord& source = *sent[call.index];
        if (source.count == call.count && source.dtype == call.dtype) continue;
        return invalid("group ", name, ", message ", call.index, " from rank ", from, " to rank ", to, ": rank ", from,
                       " called ", source.text(), ", rank ", to, " ", call.text());
      }
    }
  }
  return absl::OkStatus();
}

// Of a group whose members' counts should be equal.
absl::Status counts_differ(const std::string& name, const Members& members) {
  const auto fewer = [](const auto& a, const auto& b) { return a.second->collectives < b.second->collectives; };
  const auto [least, most] = std::minmax_element(members.begin(), members.end(), fewer);
  if (least->second->collectives != most->second->collectives) {
    std::string what = "a call";
    for (const CallRecord& call : most->second->calls) {
      if (!call.is_message() && call.index == least->second->collectives) what = describe(name, call);
    }
    return invalid(what, ": rank ", least->first, " did not make it; it made ", least->second->collectives,
                   " calls in group ", name, ", rank ", most->first, " made ", most->second->collectives);
  }
  const std::vector<int64_t>& ranks = members[0].second->group.ranks;
  const auto place = [&](int64_t rank) {
    return static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  };
  for (const auto& [from, sender] : members) {
    for (const auto& [to, receiver] : members) {
      const int64_t sent = sender->sent[place(to)], received = receiver->received[place(from)];
      if (from == to || sent == received) continue;
      return invalid("group ", name, ": rank ", from, " has sent ", sent, " messages to rank ", to,
                     ", which has awaited ", received);
    }
  }
  return absl::OkStatus();
}

// Whether `rank` has made the call of its own that belongs to `call` of rank `me`.
bool has_come(int64_t rank, int64_t me, const WaitingCall& waiting, const RankReports& reports) {
  const auto found = reports.find(rank);
  const GroupReport* group = found == reports.end() ? nullptr : found->second.find(waiting.group);
  if (group == nullptr) return false;
  const CallRecord& call = waiting.call;
  if (!call.is_message()) return group->collectives > call.index;
  const auto& ranks = group->group.ranks;
  const size_t my_place = static_cast<size_t>(std::find(ranks.begin(), ranks.end(), me) - ranks.begin());
  const std::vector<int64_t>& counts = call.kind == CallKind::kSend ? group->received : group->sent;
  return my_place < counts.size() && counts[my_place] > call.index;
}

absl::Status someone_left(const RankReports& reports) {
  for (const auto& [rank, report] : reports) {
    for (const int64_t other : awaited_ranks(report, reports)) {
      const auto found = reports.find(other);
      if (found == reports.end() || !found->second.has_left) continue;
      return failed(describe(report.waiting->group, report.waiting->call), ": rank ", other,
                    " has ended without making it; rank ", rank, " waits for it");
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string rank_list(const std::vector<int64_t>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

std::string describe(const std::string& group, const CallRecord& call) {
  return absl::StrCat("group ", group, ", ", call.name(), " (", call.text(), ")");
}

std::string position(int64_t rank, const RankReports& reports) {
  const auto found = reports.find(rank);
  if (found == reports.end()) return absl::StrCat("rank ", rank, ": nothing was heard of it");
  const RankReport& report = found->second;
  if (report.has_left) return absl::StrCat("rank ", rank, " has ended");
  if (report.waiting.has_value()) {
    return absl::StrFormat("rank %d waits since %.1f s in %s", rank, report.waiting->seconds,
                           describe(report.waiting->group, report.waiting->call));
  }
  const GroupReport* last = nullptr;
  for (const GroupReport& group : report.groups) {
    if (group.calls.empty()) continue;
    if (last == nullptr || group.calls.back().begun_ns > last->calls.back().begun_ns) last = &group;
  }
  if (last == nullptr) return absl::StrCat("rank ", rank, " has made no call yet");
  return absl::StrCat("rank ", rank, " is in no call; its last was ", describe(last->group.name, last->calls.back()));
}

std::string situation(const RankReport& mine, RankReports others, int64_t world, int64_t now_ns) {
  others[mine.rank] = mine;
  std::string out;
  for (int64_t rank = 0; rank < world; ++rank) absl::StrAppend(&out, position(rank, others), "\n");
  for (const GroupReport& group : mine.groups) {
    if (group.calls.empty()) continue;
    absl::StrAppend(&out, "the last calls of rank ", mine.rank, " in group ", group.group.name, ":\n");
    for (const CallRecord& call : group.calls) {
      const double ago_s = static_cast<double>(now_ns - call.begun_ns) * 1e-9;
      const double took_s = static_cast<double>(call.ended_ns - call.begun_ns) * 1e-9;
      absl::StrAppendFormat(&out, "  %s: %s, %.3f s ago, %s\n", call.name(), call.text(), ago_s,
                            call.ended_ns < 0 ? "under way" : absl::StrFormat("took %.6f s", took_s));
    }
  }
  return out;
}

absl::Status find_mismatch(const RankReports& reports) {
  for (const auto& [name, members] : by_group(reports)) {
    for (const auto& [rank, group] : members) {
      if (group->group.ranks == members[0].second->group.ranks) continue;
      return invalid("group ", name, ": rank ", rank, " says it has the ranks ",
                     absl::StrJoin(group->group.ranks, ", "), ", rank ", members[0].first, " says ",
                     absl::StrJoin(members[0].second->group.ranks, ", "));
    }
    PARVL_RETURN_IF_ERROR(collectives_differ(name, members));
    PARVL_RETURN_IF_ERROR(messages_differ(name, members));
  }
  return absl::OkStatus();
}

absl::Status find_difference(const RankReports& reports) {
  PARVL_RETURN_IF_ERROR(find_mismatch(reports));
  for (const auto& [name, members] : by_group(reports)) PARVL_RETURN_IF_ERROR(counts_differ(name, members));
  return invalid(
      "the ranks have made different calls, which none of them remembers; all ranks of a group must make the "
      "same calls in the same order");
}

absl::Status find_standstill(const RankReports& reports, int64_t world) {
  if (static_cast<int64_t>(reports.size()) != world) return absl::OkStatus();
  const std::optional<WaitingCall>& first = reports.begin()->second.waiting;
  for (const auto& [rank, report] : reports) {
    const std::optional<WaitingCall>& waiting = report.waiting;
    if (!waiting.has_value() || waiting->call.is_message() || waiting->group != first->group ||
        waiting->call.index != first->call.index) {
      return absl::OkStatus();
    }
  }
  for (const auto& [name, members] : by_group(reports)) PARVL_RETURN_IF_ERROR(counts_differ(name, members));
  return absl::OkStatus();
}

std::vector<int64_t> awaited_ranks(const RankReport& report, const RankReports& reports) {
  std::vector<int64_t> out;
  if (!report.waiting.has_value()) return out;
  const CallRecord& call = report.waiting->call;
  if (call.is_message()) {
    out = {call.peer};
  } else if (const GroupReport* group = report.find(report.waiting->group)) {
    out = group->group.ranks;
  }
  const auto not_awaited = [&](int64_t rank) {
    return rank == report.rank || has_come(rank, report.rank, *report.waiting, reports);
  };
  out.erase(std::remove_if(out.begin(), out.end(), not_awaited), out.end());
  return out;
}

absl::Status find_deadlock(const RankReports& reports) {
  PARVL_RETURN_IF_ERROR(someone_left(reports));
  std::map<int64_t, std::vector<int64_t>> waits;  // rank → whom it waits for, of those that wait themselves
  for (const auto& [rank, report] : reports) {
    if (report.waiting.has_value()) waits[rank] = awaited_ranks(report, reports);
  }
  // Who waits for nobody of them may still come; what is left over cannot.
  for (bool changed = true; changed;) {
    changed = false;
    for (auto it = waits.begin(); it != waits.end();) {
      std::vector<int64_t>& whom = it->second;
      whom.erase(std::remove_if(whom.begin(), whom.end(), [&](int64_t rank) { return waits.count(rank) == 0; }),
                 whom.end());
      changed = changed || whom.empty();
      it = whom.empty() ? waits.erase(it) : std::next(it);
    }
  }
  if (waits.empty()) return absl::OkStatus();
  struct Wait {
    std::string call;
    std::vector<int64_t> ranks, whom;
  };
  std::vector<Wait> list;
  for (const auto& [rank, whom] : waits) {
    const WaitingCall& waiting = *reports.at(rank).waiting;
    const std::string call = describe(waiting.group, waiting.call);
    const auto found = std::find_if(list.begin(), list.end(), [&](const Wait& wait) { return wait.call == call; });
    if (found == list.end()) {
      list.push_back({call, {rank}, whom});
    } else {
      found->ranks.push_back(rank);
    }
  }
  // First where most wait: that call was probably due.
  std::stable_sort(list.begin(), list.end(),
                   [](const Wait& a, const Wait& b) { return a.ranks.size() > b.ranks.size(); });
  std::vector<std::string> parts;
  for (const Wait& wait : list) {
    parts.push_back(absl::StrCat(rank_list(wait.ranks), " for ", rank_list(wait.whom), " in ", wait.call));
  }
  return invalid("ranks wait for each other: ", absl::StrJoin(parts, "; "),
                 "; all ranks must make the calls of all groups in one order");
}

}  // namespace parvl
