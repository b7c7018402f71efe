#include "parvl/elastic/fleet_record.h"

#include <absl/strings/str_cat.h>

#include <array>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "parvl/base/json.h"
#include "parvl/sched/replay_lines.h"

namespace parvl {
namespace {

using Said = InstanceEvent::Kind;
using Tell = RequestEvent::Kind;

constexpr int64_t kMostInstances = 10'000, kMostItems = 1 << 20;

Json settings_json(const FleetSettings& s) {
  Json pools = Json::array();
  for (const FleetPool& pool : s.pools) {
    pools.push_back({pool.name, pool.instances, pool.encodes, pool.generates, pool.hands_over, pool.takes_over});
  }
  const InstanceLimits& i = s.instance;
  return {{"fleet_record", kFleetRecordFormat},
          {"pools", std::move(pools)},
          {"instance",
           {i.start_s, i.load_s, i.warm_s, i.heartbeat_s, i.drain_s, i.release_s, i.backoff_first_s, i.backoff_most_s,
            i.backoff_forget_s}},
          {"step", {s.step.least_s, s.step.times_p99, s.step.window, s.first_step_s}},
          {"park_s", s.park_s},
          {"add", {s.add_after_s, s.add_again_s, s.add_idle_s, s.waiting_share}},
          {"costs", {s.costs.token_s, s.costs.patch_s, s.costs.running_s, s.costs.pause}},
          {"block_tokens", s.block_tokens},
          {"index_limit", s.index_limit}};
}

FleetSettings settings_from(const Json& j) {
  if (j.at("fleet_record") != kFleetRecordFormat) throw std::runtime_error("the record has another format version");
  FleetSettings s;
  int64_t instances = 0;
  for (const Json& pool : j.at("pools")) {
    s.pools.push_back({pool.at(0), pool.at(1), pool.at(2), pool.at(3), pool.at(4), pool.at(5)});
    if (s.pools.back().instances < 0 || s.pools.back().instances > kMostInstances - instances) {
      throw std::runtime_error("the pools have too many instances");
    }
    instances += s.pools.back().instances;
  }
  const auto limits = j.at("instance").get<std::array<double, 9>>();
  s.instance = {limits[0], limits[1], limits[2], limits[3], limits[4], limits[5], limits[6], limits[7], limits[8]};
  const Json& step = j.at("step");
  s.step = {step.at(0), step.at(1), step.at(2).get<size_t>()};
  s.first_step_s = step.at(3);
  s.park_s = j.at("park_s");
  const auto add = j.at("add").get<std::array<double, 4>>();
  s.add_after_s = add[0], s.add_again_s = add[1], s.add_idle_s = add[2], s.waiting_share = add[3];
  const auto costs = j.at("costs").get<std::array<double, 4>>();
  s.costs = {costs[0], costs[1], costs[2], costs[3]};
  s.block_tokens = j.at("block_tokens");
  s.index_limit = j.at("index_limit").get<size_t>();
  if (s.step.window < 1 || s.step.window > (1 << 20) || s.index_limit < 1 || s.block_tokens < 1 ||
      !(s.waiting_share >= 0 && s.waiting_share <= 1)) {
    throw std::runtime_error("a limit of the settings makes no sense");
  }
  return s;
}

Json event_json(const InstanceEvent& e) {
  Json out = {static_cast<int>(e.kind), e.at_s, e.epoch, e.step_s, static_cast<int>(e.lane), e.number};
  if (!e.reason.empty()) out.push_back(e.reason);
  return out;
}

StepLane lane_from(const Json& j) {
  const int lane = j;
  if (lane < 0 || lane >= static_cast<int>(kStepLanes)) throw std::runtime_error("a lane of steps is not known");
  return static_cast<StepLane>(lane);
}

InstanceEvent instance_event_from(const Json& j) {
  const int kind = j.at(0);
  if (kind < 0 || kind > static_cast<int>(Said::kTick)) throw std::runtime_error("an instance's event is not known");
  return {static_cast<Said>(kind),
          j.at(1),
          j.at(2),
          j.at(3),
          lane_from(j.at(4)),
          j.at(5),
          j.size() > 6 ? j.at(6).get<std::string>() : ""};
}

Json step_json(const FleetStep& step) { return {static_cast<int>(step.lane), step.size, step.seconds}; }

FleetStep step_from(const Json& j) { return {lane_from(j.at(0)), j.at(1), j.at(2)}; }

Json event_json(const RequestEvent& e) {
  Json out = {static_cast<int>(e.kind), e.instance.value, e.item, e.choice, e.attempt, e.index};
  if (!e.status.ok()) {
    out.push_back(static_cast<int>(e.status.code()));
    out.push_back(std::string(e.status.message()));
  }
  return out;
}

RequestEvent request_event_from(const Json& j, int64_t instances) {
  RequestEvent e;
  const int kind = j.at(0);
  // Who is placed where is the fleet's own to say.
  if (kind < 0 || kind > static_cast<int>(Tell::kTimeUp) || kind == static_cast<int>(Tell::kEncodingPlaced) ||
      kind == static_cast<int>(Tell::kGenerationPlaced)) {
    throw std::runtime_error("a request's event is not known");
  }
  e.kind = static_cast<Tell>(kind);
  e.instance = InstanceId{j.at(1)};
  if (e.instance.value < 0 || e.instance.value >= instances) throw std::runtime_error("there is no such instance");
  e.item = j.at(2).get<size_t>();
  e.choice = j.at(3).get<size_t>();
  e.attempt = j.at(4);
  e.index = j.at(5);
  if (j.size() > 6)
    e.status = absl::Status(static_cast<absl::StatusCode>(j.at(6).get<int>()), j.at(7).get<std::string>());
  return e;
}

Json request_json(const FleetRequest& r) {
  return {{"shape", {r.shape.items, r.shape.choices, r.shape.max_encodings, r.shape.max_generations}},
          {"needs", {r.needs.prompt_tokens, r.needs.kv_tokens}},
          {"chain", r.chain},
          {"patches", r.patches},
          {"item_key", r.item_key}};
}

FleetRequest request_from(const Json& j) {
  FleetRequest r;
  const Json& shape = j.at("shape");
  r.shape = {shape.at(0).get<size_t>(), shape.at(1).get<size_t>(), shape.at(2), shape.at(3)};
  r.needs = {j.at("needs").at(0), j.at("needs").at(1)};
  r.chain = j.at("chain").get<std::vector<uint64_t>>();
  r.patches = j.at("patches").get<std::vector<int64_t>>();
  r.item_key = j.at("item_key").get<std::vector<uint64_t>>();
  if (r.shape.choices < 1 || r.shape.choices > kMostItems || r.shape.items > kMostItems ||
      r.patches.size() != r.shape.items || r.item_key.size() != r.shape.items) {
    throw std::runtime_error("a request's numbers do not fit together");
  }
  return r;
}

Json decision_json(const Fleet::Actions& actions) {
  Json list = Json::array();
  for (const FleetAction& action : actions) {
    if (const auto* order = std::get_if<InstanceOrder>(&action)) {
      list.push_back({"instance", order->instance.value, static_cast<int>(order->action.kind), order->action.epoch,
                      order->action.number});
      continue;
    }
    const auto& order = std::get<RequestOrder>(action);
    const RequestAction& a = order.action;
    list.push_back({"request", order.request.value, static_cast<int>(a.kind), a.instance.value, a.item, a.choice,
                    a.attempt, a.lost, static_cast<int>(a.status.code()), std::string(a.status.message())});
  }
  return {{"decision", std::move(list)}};
}

std::string line_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"; }

// A fleet that is told a record's events; its decisions are written by it. What no gateway could have told is thrown.
class Replay {
 public:
  Replay(const FleetSettings& settings, RecordedFleet::Write write)
      : fleet_(settings, std::move(write)), instances_(static_cast<int64_t>(fleet_.fleet().instances().size())) {}

  void tell(const Json& j) {
    const std::string& event = j.at("event").get_ref<const std::string&>();
    if ((event == "start") == std::exchange(started_, true))
      throw std::runtime_error("it starts once, before all else");
    if (event == "start") {
      fleet_.start(j.at("at"));
    } else if (event == "tick") {
      fleet_.tick(j.at("at"));
    } else if (event == "arrive") {
      const RequestId id{j.at("id")};
      if (!known_.insert(id).second) throw std::runtime_error("a request's id comes twice");
      fleet_.arrive(id, request_from(j), j.at("at"));
    } else if (event == "request") {
      fleet_.request(RequestId{j.at("id")}, request_event_from(j.at("what"), instances_), j.at("at"));
    } else {
      tell_of_instance(event, j);
    }
  }

 private:
  void tell_of_instance(const std::string& event, const Json& j) {
    const InstanceId id{j.at("id")};
    if (id.value < 0 || id.value >= instances_) throw std::runtime_error("there is no such instance");
    if (event == "instance") {
      fleet_.instance(id, instance_event_from(j.at("what")));
    } else if (event == "loaded") {
      fleet_.loaded(id, instance_event_from(j.at("what")), {j.at("room").at(0), j.at("room").at(1)});
    } else if (event == "step_began") {
      fleet_.step_began(id, j.at("epoch"), step_from(j.at("step")), j.at("at"));
    } else if (event == "step_ended") {
      fleet_.step_ended(id, j.at("epoch"), step_from(j.at("step")), j.at("at"));
    } else if (event == "free") {
      fleet_.report_free(id, j.at("epoch"), j.at("tokens"));
    } else {
      throw std::runtime_error("an event is not known");
    }
  }

  RecordedFleet fleet_;
  const int64_t instances_;
  bool started_ = false;
  std::set<RequestId> known_;
};

}  // namespace

RecordedFleet::RecordedFleet(const FleetSettings& settings, Write write) : fleet_(settings), write_(std::move(write)) {
  if (write_) write_(line_of(settings_json(settings)));
}

Fleet::Actions RecordedFleet::told(Actions actions) const {
  if (write_ && !actions.empty()) write_(line_of(decision_json(actions)));
  return actions;
}

Fleet::Actions RecordedFleet::start(double at_s) {
  if (write_) write_(line_of({{"event", "start"}, {"at", at_s}}));
  return told(fleet_.start(at_s));
}

Fleet::Actions RecordedFleet::instance(InstanceId id, const InstanceEvent& event) {
  if (write_) write_(line_of({{"event", "instance"}, {"id", id.value}, {"what", event_json(event)}}));
  return told(fleet_.instance(id, event));
}

Fleet::Actions RecordedFleet::loaded(InstanceId id, const InstanceEvent& event, const InstanceRoom& room) {
  if (write_) {
    write_(line_of({{"event", "loaded"},
                    {"id", id.value},
                    {"what", event_json(event)},
                    {"room", {room.max_running, room.kv_tokens}}}));
  }
  return told(fleet_.loaded(id, event, room));
}

Fleet::Actions RecordedFleet::step_began(InstanceId id, int64_t epoch, const FleetStep& step, double at_s) {
  if (write_) {
    write_(line_of(
        {{"event", "step_began"}, {"id", id.value}, {"epoch", epoch}, {"step", step_json(step)}, {"at", at_s}}));
  }
  return told(fleet_.step_began(id, epoch, step, at_s));
}

Fleet::Actions RecordedFleet::step_ended(InstanceId id, int64_t epoch, const FleetStep& step, double at_s) {
  if (write_) {
    write_(line_of(
        {{"event", "step_ended"}, {"id", id.value}, {"epoch", epoch}, {"step", step_json(step)}, {"at", at_s}}));
  }
  return told(fleet_.step_ended(id, epoch, step, at_s));
}

void RecordedFleet::report_free(InstanceId id, int64_t epoch, int64_t free_kv_tokens) {
  if (write_) write_(line_of({{"event", "free"}, {"id", id.value}, {"epoch", epoch}, {"tokens", free_kv_tokens}}));
  fleet_.report_free(id, epoch, free_kv_tokens);
}

Fleet::Actions RecordedFleet::arrive(RequestId id, const FleetRequest& request, double at_s) {
  if (write_) {
    Json line = request_json(request);
    line.update({{"event", "arrive"}, {"id", id.value}, {"at", at_s}});
    write_(line_of(line));
  }
  return told(fleet_.arrive(id, request, at_s));
}

Fleet::Actions RecordedFleet::request(RequestId id, const RequestEvent& event, double at_s) {
  if (write_) {
    write_(line_of({{"event", "request"}, {"id", id.value}, {"what", event_json(event)}, {"at", at_s}}));
  }
  return told(fleet_.request(id, event, at_s));
}

Fleet::Actions RecordedFleet::tick(double at_s) {
  if (write_) write_(line_of({{"event", "tick"}, {"at", at_s}}));
  return told(fleet_.tick(at_s));
}

bool is_fleet_record(std::string_view record) {
  return record.substr(0, record.find('\n')).find("\"fleet_record\"") != std::string_view::npos;
}

absl::StatusOr<ReplayReport> replay_fleet(std::string_view record) {
  std::optional<Replay> replay;
  ReplayedCode code;
  code.begin = [&replay](const Json& settings, RecordedFleet::Write write) {
    replay.emplace(settings_from(settings), std::move(write));
    return absl::OkStatus();
  };
  code.tell = [&replay](const Json& event) {
    replay->tell(event);
    return absl::OkStatus();
  };
  return replay_lines(record, code);
}

}  // namespace parvl
