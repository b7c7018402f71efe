// What instances say of themselves, and what they are told.
#include <absl/strings/str_cat.h>

#include <algorithm>
#include <utility>

#include "parvl/base/log.h"
#include "parvl/serve/pools/fleet_engine_parts.h"
#include "parvl/serve/pools/pixels.h"
#include "parvl/serve/pools/wire.h"

namespace parvl {
namespace {

template <typename Step>
StepLane lane_of(const Step& step) {
  return step.encodes() ? StepLane::kEncoder : StepLane::kBackbone;
}

void log_added(const std::string& name, const absl::Status& status) {
  if (status.ok()) return log_info(name, " encodes, too");
  log_warning(name, " cannot take on the vision encoder, and goes on without: ", status.message());
}

}  // namespace

std::string FleetEngine::name_of(InstanceId id) const {
  return absl::StrCat("instance ", id.value, " of ", options_.fleet.pools[fleet_.fleet().instance(id).pool].name);
}

FleetEngine::Link& FleetEngine::link(InstanceId id) { return links_[static_cast<size_t>(id.value)]; }

void FleetEngine::send(InstanceId id, wire::Command command) {
  const Link& link = this->link(id);
  if (link.stream.has_value()) server_->send(*link.stream, std::move(command));
}

// Nobody gives that process anything any more, wherever it still asks.
void FleetEngine::fence(InstanceId id, int64_t epoch) {
  options_.pixels->fence(instance_name(id), epoch);
  for (size_t i = 0; i < links_.size(); ++i) {
    if (links_[i].stream == std::nullopt || static_cast<int64_t>(i) == id.value) continue;
    wire::Command command;
    command.mutable_fence()->set_instance(id.value);
    command.mutable_fence()->set_epoch(epoch);
    send(InstanceId{static_cast<int64_t>(i)}, std::move(command));
  }
}

// Its first words. One that was started before the last failure, or that nobody started, is turned away.
bool FleetEngine::attach(StreamId stream, InstanceId id, const wire::FromInstance& message) {
  Link& link = this->link(id);
  const bool speaks = message.said_size() > 0 && message.said(0).has_hello();
  const InstanceState state = fleet_.fleet().instance(id).state;
  if (!speaks || message.epoch() != link.epoch || link.stream.has_value() || state != InstanceState::kStarting) {
    return false;
  }
  streams_.emplace(stream, id);
  link.stream = stream;
  link.pids = {message.said(0).hello().pid()};
  return true;
}

void FleetEngine::take(StreamId stream, const wire::FromInstance& message) {
  const InstanceId id{message.instance()};
  if (id.value < 0 || id.value >= static_cast<int64_t>(links_.size())) return server_->close(stream);
  touched_.insert(id);
  const auto known = streams_.find(stream);
  const bool attached = known != streams_.end() ? known->second == id : attach(stream, id, message);
  if (!attached) {
    // What a past epoch still says is counted, and has no other effect.
    const int64_t epoch = std::min(message.epoch(), link(id).epoch - 1);
    for (int i = 0; i < message.said_size(); ++i) {
      act(fleet_.instance(id, {.kind = InstanceEvent::Kind::kAlive, .at_s = now(), .epoch = epoch}));
    }
    return server_->close(stream);
  }
  Link& link = this->link(id);
  if (message.has_counts()) {
    link.counts = read_stats(message.counts());
    fleet_.report_free(id, message.epoch(), link.counts.free_kv_tokens);
  }
  for (const wire::Said& said : message.said()) {
    if (link.stream != stream) return;  // what it said before has ended it
    take_said(id, message.epoch(), said);
  }
}

void FleetEngine::take_said(InstanceId id, int64_t epoch, const wire::Said& said) {
  using Kind = InstanceEvent::Kind;
  InstanceEvent event = {.kind = Kind::kAlive, .at_s = now(), .epoch = epoch};
  switch (said.what_case()) {
    case wire::Said::kHello:
      event.kind = Kind::kHello;
      break;
    case wire::Said::kLoaded:
      event.kind = Kind::kLoaded;
      link(id).device = said.loaded().device();
      if (said.loaded().pids_size() > 0) {
        link(id).pids.assign(said.loaded().pids().begin(), said.loaded().pids().end());
      }
      return act(fleet_.loaded(id, event, {said.loaded().max_running(), said.loaded().kv_tokens()}));
    case wire::Said::kWarmed:
      event.kind = Kind::kWarmed;
      break;
    case wire::Said::kStepBegan:
      return act(fleet_.step_began(id, epoch, {lane_of(said.step_began()), said.step_began().size()}, now()));
    case wire::Said::kStepEnded: {
      const wire::StepEnded& step = said.step_ended();
      return act(fleet_.step_ended(id, epoch, {lane_of(step), step.size(), step.seconds()}, now()));
    }
    case wire::Said::kToken:
      return take_token(id, said.token());
    case wire::Said::kEnded:
      return take_end(id, said.ended());
    case wire::Said::kEncoded:
      return take_encoded(id, said.encoded());
    case wire::Said::kRefused:
      event.kind = Kind::kRefused;
      link(id).refusal = read_failure(said.refused());
      event.reason = said.refused().message();
      break;
    case wire::Said::kAdded: {
      const absl::Status status = read_failure(said.added().failure());
      event.kind = status.ok() ? Kind::kAdded : Kind::kAddRefused;
      event.number = said.added().number();
      event.reason = std::string(status.message());
      log_added(name_of(id), status);
      break;
    }
    case wire::Said::kAlive:
    case wire::Said::WHAT_NOT_SET:
      break;
  }
  act(fleet_.instance(id, event));
}

// Its process may live on: it is fenced, and ended, like one that has died. Of one that was released the end of its
// process is still to come, and is what counts.
void FleetEngine::lost_stream(StreamId stream) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return;
  const InstanceId id = found->second;
  Link& link = this->link(id);
  if (!link.released) {
    act(fleet_.instance(
        id,
        {.kind = InstanceEvent::Kind::kExited, .at_s = now(), .epoch = link.epoch, .reason = "its connection broke"}));
  }
  streams_.erase(stream);
  if (link.stream == stream) link.stream.reset();
}

// Of a pool's own modules; or, with the number of that order, of the encoder beside them.
void FleetEngine::assign(InstanceId id, const EngineOptions& engine, int64_t adds) {
  const FleetPool& pool = options_.fleet.pools[fleet_.fleet().instance(id).pool];
  wire::Command command;
  wire::Assign& message = *command.mutable_assign();
  message.set_model_dir(options_.model_dir);
  message.set_fingerprint(options_.fingerprint);
  message.set_encodes_alone(adds != 0 || (!pool.generates && !pool.takes_over));
  message.set_adds(adds);
  message.set_transfer_bytes(options_.feature_bytes);
  message.set_hands_over(pool.hands_over);
  write_options(engine, message);
  send(id, std::move(command));
}

void FleetEngine::act(const InstanceOrder& order) {
  using Kind = InstanceAction::Kind;
  Link& link = this->link(order.instance);
  const size_t pool_index = fleet_.fleet().instance(order.instance).pool;
  const FleetPool& pool = options_.fleet.pools[pool_index];
  const std::string name = name_of(order.instance);
  touched_.insert(order.instance);
  wire::Command command;
  switch (order.action.kind) {
    case Kind::kStart:
      link.epoch = order.action.epoch;
      link.stream.reset();
      link.released = false;
      link.pids.clear();
      starter_->start({order.instance, order.action.epoch, pool.name, server_->address(), options_.pixels->token()});
      return;
    case Kind::kAssign:
      log_info(name, " (process ", link.pids.front(), ") takes on its modules");
      return assign(order.instance, options_.engines[pool_index], 0);
    case Kind::kAdd: {
      log_info(name, " takes on the vision encoder beside its modules, since no instance of ",
               options_.fleet.pools[*encoders_].name, " is ready");
      EngineOptions options = options_.engines[*encoders_];
      const LoadOptions& own = options_.engines[pool_index].load;
      if (own.device != options.load.device) options.load.shared_weights.clear();
      options.load.device = own.device;
      options.load.memory_limit_bytes = own.memory_limit_bytes;
      return assign(order.instance, options, order.action.number);
    }
    case Kind::kGiveBack:
      log_info(name, " gives the vision encoder back");
      command.set_give_back(true);
      return send(order.instance, std::move(command));
    case Kind::kWarm:
      command.set_warm(true);
      return send(order.instance, std::move(command));
    case Kind::kOpen:
      link.refusal = absl::OkStatus();
      return log_info(name, " is ready on ", link.device);
    case Kind::kClose:
      return log_info(name, " takes no new requests");
    case Kind::kMove:
      return;  // its requests were told
    case Kind::kFence: {
      if (link.stream.has_value()) {
        streams_.erase(*link.stream);
        server_->close(*link.stream);
      }
      fence(order.instance, order.action.epoch);
      add_counts(past_[fleet_.fleet().instance(order.instance).pool], std::exchange(link.counts, {}));
      link.stream.reset();
      link.pids.clear();  // soon other processes may have them
      const InstanceView view = fleet_.fleet().instance(order.instance);
      if (view.state == InstanceState::kGone) return log_info(name, " is gone");
      return log_warning(name, " failed (", view.reason, "); it is started again, and its requests go on elsewhere");
    }
    case Kind::kRelease:
      link.released = true;
      command.set_release(true);
      return send(order.instance, std::move(command));
    case Kind::kKill:
      return starter_->kill(order.instance, order.action.epoch);
  }
}

}  // namespace parvl
