// What instances say, and what becomes of the requests that it is about.
#include <algorithm>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/serve/pools/fleet_engine_parts.h"
#include "parvl/serve/pools/wire.h"

namespace parvl {
namespace {

constexpr size_t kMessageSlack = 1 << 20;  // for what is sent beside one request

}  // namespace

// Its first words. One that was started before the last failure, or that nobody started, is turned away.
bool FleetEngine::attach(StreamId stream, InstanceId id, const wire::FromInstance& message) {
  Link& link = links_[static_cast<size_t>(id.value)];
  const bool speaks = message.said_size() > 0 && message.said(0).has_hello();
  if (!speaks || message.epoch() != link.epoch || link.stream.has_value()) return false;
  streams_.emplace(stream, id);
  link.stream = stream;
  link.pid = message.said(0).hello().pid();
  return true;
}

void FleetEngine::take(StreamId stream, const wire::FromInstance& message) {
  const InstanceId id{message.instance()};
  if (id.value < 0 || id.value >= static_cast<int64_t>(links_.size())) return server_->close(stream);
  const auto known = streams_.find(stream);
  const bool attached = known != streams_.end() ? known->second == id : attach(stream, id, message);
  if (!attached) {
    // What a past epoch still says is counted, and has no other effect.
    const int64_t epoch = std::min(message.epoch(), links_[static_cast<size_t>(id.value)].epoch - 1);
    for (int i = 0; i < message.said_size(); ++i) {
      act(fleet_.instance(id, {.kind = InstanceEvent::Kind::kAlive, .at_s = now(), .epoch = epoch}));
    }
    return server_->close(stream);
  }
  Link& link = links_[static_cast<size_t>(id.value)];
  if (message.has_counts()) {
    link.counts = read_stats(message.counts());
    const int64_t blocks = std::max<int64_t>(1, link.counts.blocks);
    const int64_t block = fleet_.instances()[static_cast<size_t>(id.value)].room.kv_tokens / blocks;
    fleet_.report_free(id, message.epoch(), (link.counts.blocks - link.counts.blocks_used) * block);
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
      links_[static_cast<size_t>(id.value)].device = said.loaded().device();
      return act(fleet_.loaded(id, event, {said.loaded().max_running(), said.loaded().kv_tokens()}));
    case wire::Said::kWarmed:
      event.kind = Kind::kWarmed;
      break;
    case wire::Said::kStepBegan:
      return act(fleet_.step_began(id, epoch, said.step_began().size(), now()));
    case wire::Said::kStepEnded:
      return act(fleet_.step_ended(id, epoch, said.step_ended().size(), said.step_ended().seconds(), now()));
    case wire::Said::kToken:
      return take_token(id, said.token());
    case wire::Said::kEnded:
      return take_end(id, said.ended());
    case wire::Said::kRefused:
      event.kind = Kind::kRefused;
      links_[static_cast<size_t>(id.value)].refusal = read_failure(said.refused());
      event.reason = said.refused().message();
      break;
    case wire::Said::kAlive:
    case wire::Said::WHAT_NOT_SET:
      break;
  }
  act(fleet_.instance(id, event));
}

// Its process may live on: it is fenced, and ended, like one that has died.
void FleetEngine::lost_stream(StreamId stream) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return;
  const InstanceId id = found->second;
  act(fleet_.instance(id, {.kind = InstanceEvent::Kind::kExited,
                           .at_s = now(),
                           .epoch = links_[static_cast<size_t>(id.value)].epoch,
                           .reason = "its connection broke"}));
}

void FleetEngine::take_token(InstanceId id, const wire::Token& token) {
  const RequestId request{token.request()};
  const auto found = live_.find(request);
  if (found == live_.end()) return;  // it has ended
  token_ = read_token(token);
  const auto index = static_cast<int64_t>(found->second->result.token_ids.size());
  act(fleet_.request(request,
                     {.kind = RequestEvent::Kind::kToken, .instance = id, .attempt = token.attempt(), .index = index},
                     now()));
  token_.reset();
}

void FleetEngine::take_end(InstanceId id, const wire::Ended& ended) {
  const RequestId request{ended.request()};
  const auto found = live_.find(request);
  if (found == live_.end()) return;
  RequestEvent event = {.instance = id, .attempt = ended.attempt(), .status = read_failure(ended.failure())};
  GenerateResult& result = found->second->result;
  if (!std::exchange(found->second->has_end, true)) result.cached_tokens = ended.cached_tokens();
  result.queue_ms += ended.queue_ms();
  result.encode_ms += ended.encode_ms();
  result.prefill_ms += ended.prefill_ms();
  result.overlap_ms += ended.overlap_ms();
  event.kind = event.status.ok() && result.finish != FinishReason::kNone ? RequestEvent::Kind::kFinished
                                                                         : RequestEvent::Kind::kGenerationFailed;
  // Nobody here had asked for its end: its engine was stopped.
  if (event.status.ok()) event.status = absl::UnavailableError("its instance has stopped");
  act(fleet_.request(request, event, now()));
}

void FleetEngine::act(const RequestOrder& order) {
  using Kind = RequestAction::Kind;
  Live& live = *live_.at(order.request);
  switch (order.action.kind) {
    case Kind::kGenerate:
      return generate(order, live);
    case Kind::kDeliver:
      return deliver(live);
    case Kind::kCancelGeneration: {
      wire::Command command;
      command.mutable_cancel()->set_request(order.request.value);
      command.mutable_cancel()->set_attempt(order.action.attempt);
      return send(order.action.instance, std::move(command));
    }
    case Kind::kEnd:
      return end(order.request, order.action.status);
    case Kind::kEncode:
    case Kind::kLetGo:
    case Kind::kCancelEncoding:
    case Kind::kPlaceEncoding:
    case Kind::kPlaceGeneration:
      PARVL_CHECK(false, "a request without items of its own, or a place that nobody has chosen");
  }
}

void FleetEngine::generate(const RequestOrder& order, Live& live) {
  wire::Command command;
  wire::Generate& message = *command.mutable_generate();
  message.set_request(order.request.value);
  message.set_attempt(order.action.attempt);
  write_request(live.request, message);
  message.mutable_generated()->Add(live.result.token_ids.begin(), live.result.token_ids.end());
  if (command.ByteSizeLong() + kMessageSlack > static_cast<size_t>(kMaxMessageBytes)) {
    return post([this, order] {
      act(fleet_.request(
          order.request,
          {.kind = RequestEvent::Kind::kGenerationFailed,
           .instance = order.action.instance,
           .attempt = order.action.attempt,
           .status = invalid("the images of the request take more room than an instance is sent at once")},
          now()));
    });
  }
  send(order.action.instance, std::move(command));
}

void FleetEngine::deliver(Live& live) {
  GenerateResult& result = live.result;
  const double at_s = now();
  if (result.token_ids.empty()) {
    live.first_token_s = at_s;
    result.ttft_ms = (at_s - live.arrival_s) * 1e3;
  } else {
    result.tpot_ms = (at_s - live.first_token_s) * 1e3 / static_cast<double>(result.token_ids.size());
  }
  result.token_ids.push_back(token_->token_id);
  result.text += token_->text;
  if (live.request.sampling.logprobs) result.logprobs.push_back(token_->logprob);
  result.finish = token_->finish;
  live.request.on_token(*token_);
}

void FleetEngine::end(RequestId id, const absl::Status& status) {
  const auto live = live_.extract(id);
  const Live& ended = *live.mapped();
  // A client that has left is no failure: finish kNone says that nobody waited for the rest.
  if (status.ok() || absl::IsCancelled(status)) {
    ended.request.on_end(ended.result);
  } else {
    ended.request.on_end(status);
  }
}

}  // namespace parvl
