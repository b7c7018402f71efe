// What instances say, and what becomes of the requests that it is about.
#include <absl/strings/str_cat.h>

#include <algorithm>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/serve/pools/fleet_engine_parts.h"
#include "parvl/serve/pools/wire.h"

namespace parvl {
namespace {

void note(std::vector<InstanceId>& instances, InstanceId one) {
  if (std::find(instances.begin(), instances.end(), one) == instances.end()) instances.push_back(one);
}

}  // namespace

// "instance 2, then 3 of llm-pool"
std::string FleetEngine::places_text(const std::vector<InstanceId>& instances) const {
  std::string out = "instance ";
  for (size_t i = 0; i < instances.size(); ++i) {
    const auto pool = [&](size_t of) { return fleet_.fleet().instance(instances[of]).pool; };
    absl::StrAppend(&out, i == 0 ? "" : ", then ", instances[i].value);
    if (i + 1 < instances.size() && pool(i + 1) == pool(i)) continue;
    absl::StrAppend(&out, " of ", options_.fleet.pools[pool(i)].name);
  }
  return out;
}

void FleetEngine::take_token(InstanceId id, const wire::Token& token) {
  const RequestId request{token.request()};
  const auto found = live_.find(request);
  if (found == live_.end() || found->second->generation != token.attempt()) return;  // it has ended, or moved
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
  if (found == live_.end() || found->second->generation != ended.attempt()) return;
  RequestEvent event = {.instance = id, .attempt = ended.attempt(), .status = read_failure(ended.failure())};
  GenerateResult& result = found->second->result;
  if (!std::exchange(found->second->has_end, true)) result.cached_tokens = ended.cached_tokens();
  result.queue_ms += ended.queue_ms();
  result.encode_ms += ended.encode_ms();
  result.prefill_ms += ended.prefill_ms();
  result.overlap_ms += ended.overlap_ms();
  result.fetch_ms += ended.fetch_ms();
  for (const int32_t item : ended.not_fetched()) {
    act(fleet_.request(
        request,
        {.kind = RequestEvent::Kind::kOutputLost, .item = static_cast<size_t>(item), .attempt = ended.attempt()},
        now()));
  }
  if (ended.kv_lost()) {
    act(fleet_.request(request, {.kind = RequestEvent::Kind::kKvLost, .attempt = ended.attempt()}, now()));
  }
  if (!ended.kv().empty()) {
    found->second->kv = ended.kv();
    event.kind = RequestEvent::Kind::kPrefilled;
    return act(fleet_.request(request, event, now()));
  }
  event.kind = event.status.ok() && result.finish != FinishReason::kNone ? RequestEvent::Kind::kFinished
                                                                         : RequestEvent::Kind::kGenerationFailed;
  // Nobody here had asked for its end: its engine was stopped.
  if (event.status.ok()) event.status = absl::UnavailableError("its instance has stopped");
  act(fleet_.request(request, event, now()));
}

void FleetEngine::act(const RequestOrder& order) {
  using Kind = RequestAction::Kind;
  Live& live = *live_.at(order.request);
  touched_.insert(order.action.instance);
  switch (order.action.kind) {
    case Kind::kGenerate:
    case Kind::kDecode:
      return generate(order, live);
    case Kind::kDeliver:
      return deliver(live);
    case Kind::kCancelGeneration: {
      live.generation = 0;
      wire::Command command;
      command.mutable_cancel()->set_request(order.request.value);
      command.mutable_cancel()->set_attempt(order.action.attempt);
      return send(order.action.instance, std::move(command));
    }
    case Kind::kEnd:
      return end(order.request, order.action.status);
    case Kind::kEncode:
      return encode(order, live);
    case Kind::kCancelEncoding:
      live.items[order.action.item].attempt = 0;
      return let_go(order);
    case Kind::kLetGoKv: {
      live.kv.clear();
      wire::Command command;
      command.mutable_let_go_kv()->set_request(order.request.value);
      command.mutable_let_go_kv()->set_attempt(order.action.attempt);
      return send(order.action.instance, std::move(command));
    }
    case Kind::kLetGo:
      live.items[order.action.item].output.clear();
      return let_go(order);
    case Kind::kPlaceEncoding:
    case Kind::kPlaceGeneration:
    case Kind::kPlaceDecoding:
      PARVL_CHECK(false, "a place that nobody has chosen");
  }
}

void FleetEngine::encode(const RequestOrder& order, Live& live) {
  const size_t item = order.action.item;
  live.items[item] = {order.action.attempt, ""};
  note(live.encoded_on, order.action.instance);
  const ProcessedImage& image = *live.request.prompt->images[item];
  wire::Command command;
  wire::Encode& message = *command.mutable_encode();
  message.set_request(order.request.value);
  message.set_item(static_cast<int32_t>(item));
  message.set_attempt(order.action.attempt);
  write_image(image, {image.place->handle(), ""}, *message.mutable_image());
  send(order.action.instance, std::move(command));
}

void FleetEngine::let_go(const RequestOrder& order) {
  wire::Command command;
  command.mutable_let_go()->set_request(order.request.value);
  command.mutable_let_go()->set_item(static_cast<int32_t>(order.action.item));
  command.mutable_let_go()->set_attempt(order.action.attempt);
  command.mutable_let_go()->set_lost(order.action.lost);
  send(order.action.instance, std::move(command));
}

void FleetEngine::take_encoded(InstanceId id, const wire::Encoded& encoded) {
  const RequestId request{encoded.request()};
  const auto found = live_.find(request);
  const auto index = static_cast<size_t>(encoded.item());
  if (found == live_.end() || index >= found->second->items.size()) return;
  Live::Item& item = found->second->items[index];
  if (item.attempt != encoded.attempt()) return;  // it was called off, and the instance knows
  RequestEvent event = {.instance = id, .item = index, .attempt = encoded.attempt()};
  event.status = read_failure(encoded.failure());
  event.kind = event.status.ok() ? RequestEvent::Kind::kEncoded : RequestEvent::Kind::kEncodingFailed;
  item = {0, encoded.output()};
  found->second->result.encode_ms += encoded.seconds() * 1e3;
  act(fleet_.request(request, event, now()));
}

void FleetEngine::generate(const RequestOrder& order, Live& live) {
  live.generation = order.action.attempt;
  note(live.generated_on, order.action.instance);
  std::vector<ImagePlace> places;
  for (const Live::Item& item : live.items) places.push_back({"", item.output});
  if (live.items.empty()) {
    // The instance encodes them; whoever goes on has them in what it is given.
    const bool has_kv = order.action.kind == RequestAction::Kind::kDecode;
    for (const auto& image : live.request.prompt->images) {
      places.push_back({has_kv ? "" : image->place->handle(), ""});
      if (!has_kv) note(live.encoded_on, order.action.instance);
    }
  }
  wire::Command command;
  wire::Generate& message = *command.mutable_generate();
  message.set_request(order.request.value);
  message.set_attempt(order.action.attempt);
  write_request(live.request, places, message);
  const std::vector<TokenId>& tokens = live.result.token_ids;
  message.mutable_generated()->Add(tokens.begin(), tokens.end());
  if (order.action.kind == RequestAction::Kind::kDecode) {
    message.set_kv_at(live.kv);
    message.set_kv_tokens(static_cast<int64_t>(live.request.prompt->ids.size() + tokens.size()) - 1);
  } else {
    message.set_hand_over(options_.fleet.pools[fleet_.fleet().instance(order.action.instance).pool].hands_over);
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
  Live& ended = *live.mapped();
  for (const auto& [module, on] :
       {std::pair("vision_encoder", &ended.encoded_on), std::pair("llm_backbone", &ended.generated_on)}) {
    if (!on->empty()) ended.result.ran_on.emplace_back(module, places_text(*on));
  }
  // A client that has left is no failure: finish kNone says that nobody waited for the rest.
  if (status.ok() || absl::IsCancelled(status)) {
    ended.request.on_end(ended.result);
  } else {
    ended.request.on_end(status);
  }
}

}  // namespace parvl
