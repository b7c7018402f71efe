#include "parvl/elastic/fleet.h"

#include <absl/strings/str_cat.h>

#include <algorithm>
#include <utility>

#include "parvl/base/check.h"
#include "parvl/elastic/fleet_parts.h"

namespace parvl {

using Order = InstanceAction::Kind;
using Do = RequestAction::Kind;
using Tell = RequestEvent::Kind;
using State = InstanceState;

Fleet::Fleet(FleetSettings settings) : settings_(std::move(settings)) {
  for (size_t pool = 0; pool < settings_.pools.size(); ++pool) {
    for (int64_t i = 0; i < settings_.pools[pool].instances; ++i) {
      const InstanceId id{static_cast<int64_t>(instances_.size())};
      instances_.push_back(std::make_unique<Instance>(id, pool, settings_));
    }
  }
}

Fleet::~Fleet() = default;

const FleetPool& Fleet::pool_of(const Instance& instance) const { return settings_.pools[instance.pool]; }

Fleet::Actions Fleet::start(double at_s) {
  Actions out;
  for (const auto& instance : instances_) carry_out(*instance, instance->life.start(at_s), at_s, out);
  return out;
}

Fleet::Actions Fleet::instance(InstanceId id, const InstanceEvent& event) {
  Actions out;
  carry_out(at(id), at(id).life.handle(event), event.at_s, out);
  take_added(at(id), event, out);
  settle(event.at_s, out);
  return out;
}

Fleet::Actions Fleet::loaded(InstanceId id, const InstanceEvent& event, const InstanceRoom& room) {
  Instance& instance = at(id);
  if (event.epoch == instance.life.epoch()) {
    instance.room = room;
    instance.free_kv_tokens = room.kv_tokens;
  }
  return this->instance(id, event);
}

Fleet::Actions Fleet::step_began(InstanceId id, int64_t epoch, const FleetStep& step, double at_s) {
  InstanceEvent event = {.kind = InstanceEvent::Kind::kStepBegan, .at_s = at_s, .epoch = epoch};
  event.step_s = at(id).steps[static_cast<size_t>(step.lane)].limit_s(step.size);
  event.lane = step.lane;
  return instance(id, event);
}

Fleet::Actions Fleet::step_ended(InstanceId id, int64_t epoch, const FleetStep& step, double at_s) {
  if (epoch == at(id).life.epoch()) at(id).steps[static_cast<size_t>(step.lane)].took(step.size, step.seconds);
  InstanceEvent event = {.kind = InstanceEvent::Kind::kStepEnded, .at_s = at_s, .epoch = epoch};
  event.lane = step.lane;
  return instance(id, event);
}

void Fleet::report_free(InstanceId id, int64_t epoch, int64_t free_kv_tokens) {
  if (epoch == at(id).life.epoch()) at(id).free_kv_tokens = free_kv_tokens;
}

void Fleet::carry_out(Instance& instance, const std::vector<InstanceAction>& actions, double at_s, Actions& out) {
  for (const InstanceAction& action : actions) {
    if (action.kind == Order::kOpen) instance.open = true;
    if (action.kind == Order::kClose) instance.open = false;
    if (action.kind == Order::kFence) instance.begin_cold(settings_);
    out.push_back(InstanceOrder{instance.id, action});
    if (action.kind == Order::kMove) {
      instance.must_move = instance.life.finishes();
      if (!instance.must_move) move_all(instance, at_s, out);
    }
    if (action.kind == Order::kOpen) place_parked(at_s, out);
  }
}

void Fleet::move_all(Instance& instance, double at_s, Actions& out) {
  std::vector<RequestId> there;
  for (const auto& [id, request] : requests_) {
    if (request->uses(instance)) there.push_back(id);
  }
  for (const RequestId id : there) {
    for (const FleetAction& action : request(id, {.kind = Tell::kInstanceLost, .instance = instance.id}, at_s)) {
      out.push_back(action);
    }
  }
}

Fleet::Actions Fleet::arrive(RequestId id, FleetRequest what, double at_s) {
  const size_t items = what.shape.items;
  PARVL_CHECK(what.patches.size() == items && what.item_key.size() == items, "items without a size or a key");
  const auto [place, is_new] = requests_.emplace(id, std::make_unique<Request>(std::move(what), items));
  PARVL_CHECK(is_new, "a request's id that is in use");
  Actions out;
  carry_out(id, place->second->life.start(), at_s, out);
  return out;
}

Fleet::Actions Fleet::request(RequestId id, const RequestEvent& event, double at_s) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return {};
  Request& request = *found->second;
  // What is lost is left before anybody else is chosen.
  if (event.kind == Tell::kInstanceLost) {
    const Instance* const lost = &at(event.instance);
    if (request.generating == lost) request.leave_generation();
    if (request.kv_on == lost) request.leave_kv();
    for (size_t i = 0; i < request.encoding.size(); ++i) {
      if (request.encoding[i] == lost) request.leave_encoding(i);
      if (request.holding[i] == lost) request.leave_output(i);
    }
  }
  if (event.kind == Tell::kEncodingFailed && event.item < request.encoding.size()) {
    request.failed_encoding[event.item] = request.encoding[event.item];
  }
  if (event.kind == Tell::kOutputLost && event.item < request.encoding.size()) {
    request.failed_encoding[event.item] = request.holding[event.item];
  }
  Actions out;
  std::vector<RequestAction> actions = request.life.handle(event);
  if (event.kind == Tell::kGenerationFailed && !actions.empty()) {
    request.failed_generating = request.generating;
    request.leave_generation();
  }
  // What the lifecycle did not take up was late, and changes nothing here either.
  if (event.kind == Tell::kPrefilled && request.life.has_kv() && request.kv_on == nullptr) request.keep_kv();
  const bool encoded = event.kind == Tell::kEncoded && event.item < request.encoding.size();
  if (encoded && request.life.holder(event.item).has_value() && request.encoding[event.item] != nullptr) {
    Instance* const there = request.encoding[event.item];
    request.leave_encoding(event.item);
    request.holding[event.item] = there;
    ++there->held;
  }
  carry_out(id, std::move(actions), at_s, out);
  settle(at_s, out);
  return out;
}

// One after the other, what follows from an action before the next one: a choice counts for the choice after it.
void Fleet::carry_out(RequestId id, std::vector<RequestAction> actions, double at_s, Actions& out) {
  Request& request = *requests_.at(id);
  std::deque<RequestAction> left(actions.begin(), actions.end());
  while (!left.empty()) {
    const RequestAction action = std::move(left.front());
    left.pop_front();
    const std::optional<RequestEvent> event = apply(id, request, action, at_s, out);
    if (!event.has_value()) continue;
    const std::vector<RequestAction> next = request.life.handle(*event);
    left.insert(left.begin(), next.begin(), next.end());
  }
  if (!request.life.ended()) return;
  request.leave_all();
  std::erase_if(parked_, [id](const Parked& parked) { return parked.request == id; });
  requests_.erase(id);
}

std::optional<RequestEvent> Fleet::apply(RequestId id, Request& request, const RequestAction& action, double at_s,
                                         Actions& out) {
  switch (action.kind) {
    case Do::kPlaceEncoding:
    case Do::kPlaceGeneration:
    case Do::kPlaceDecoding:
      return place(id, request, action, at_s);
    case Do::kEncode: {
      Instance& instance = at(action.instance);
      request.encoding[action.item] = &instance;
      ++instance.encodings;
      instance.pending_patches += request.what.patches[action.item];
      instance.images.add({&request.what.item_key[action.item], 1});
      break;
    }
    case Do::kDecode:  // its prompt finds room there, or waits for it
    case Do::kGenerate: {
      Instance& instance = at(action.instance);
      const auto cached = static_cast<int64_t>(instance.prefixes.match(request.what.chain)) * settings_.block_tokens;
      request.generating = &instance;
      request.pending_tokens = std::max<int64_t>(0, request.what.needs.prompt_tokens - cached);
      ++instance.generations;
      instance.pending_tokens += request.pending_tokens;
      instance.pending_prompts += request.pending_tokens > 0 ? 1 : 0;
      instance.prefixes.add(request.what.chain);
      break;
    }
    case Do::kDeliver:
      request.computed_prompt();
      break;
    case Do::kLetGo:
      request.leave_output(action.item);
      break;
    case Do::kLetGoKv:
      request.leave_kv();
      break;
    case Do::kCancelEncoding:
      request.leave_encoding(action.item);
      break;
    case Do::kCancelGeneration:
      request.leave_generation();
      break;
    case Do::kEnd:
      break;
  }
  out.push_back(RequestOrder{id, action});
  return std::nullopt;
}

// What `action` asks for of a pool.
bool FleetPool::*Fleet::asked(const RequestAction& action) {
  if (action.kind == Do::kPlaceDecoding) return &FleetPool::takes_over;
  return action.kind == Do::kPlaceEncoding ? &FleetPool::encodes : &FleetPool::generates;
}

// Whether any instance may come to do it. An image waits for those, too, that could take the encoder on.
bool Fleet::is_coming(const RequestAction& action) const {
  return is_coming(asked(action)) || (action.kind == Do::kPlaceEncoding && is_coming(&FleetPool::generates));
}

RequestEvent Fleet::placed(const RequestAction& action, InstanceId chosen) const {
  return {.kind = action.kind == Do::kPlaceEncoding ? Tell::kEncodingPlaced : Tell::kGenerationPlaced,
          .instance = chosen,
          .item = action.item,
          .attempt = action.attempt,
          .hands_over = settings_.pools[instances_[static_cast<size_t>(chosen.value)]->pool].hands_over};
}

// What was asked for before is not asked for any more: of that item, or of the generation, for which all items must be
// there.
std::optional<RequestEvent> Fleet::place(RequestId id, Request& request, const RequestAction& action, double at_s) {
  const bool encodes = action.kind == Do::kPlaceEncoding;
  std::erase_if(parked_, [&](const Parked& parked) {
    return parked.request == id && (!parked.encodes() || parked.action.item == action.item);
  });
  if (encodes) {
    request.leave_encoding(action.item);
    request.leave_output(action.item);
  } else {
    request.leave_generation();
  }
  if (const auto chosen = choose(request, action); chosen.has_value()) return placed(action, *chosen);
  if (!is_coming(action)) return RequestEvent{.kind = Tell::kNowhere, .status = missing(asked(action))};
  // Whoever was under way may wait; a new one only while there is room for it.
  if (encodes && action.attempt == 1 && is_crowded(id)) {
    return RequestEvent{.kind = Tell::kNowhere, .status = crowded()};
  }
  parked_.push_back({id, action, at_s});
  return std::nullopt;
}

std::optional<InstanceId> Fleet::choose(const Request& request, const RequestAction& action) const {
  const bool encodes = action.kind == Do::kPlaceEncoding;
  const Instance* const failed = encodes ? request.failed_encoding[action.item] : request.failed_generating;
  // Who has added the encoder comes after those whose work it is, then who has just failed, and last who takes nothing
  // new: it finishes what is under way.
  const bool under_way = action.attempt > 1 || (!encodes && request.what.shape.items > 0);
  enum { kFirst, kAdded, kFailed, kLeaving };
  std::array<std::vector<InstanceLoad>, kLeaving + 1> loads;
  for (const auto& instance : instances_) {
    const bool leaving = under_way && instance->life.finishes();
    const bool own = (instance->open || leaving) && pool_of(*instance).*asked(action);
    if (!own && !(encodes && this->encodes(*instance))) continue;
    InstanceLoad load;
    load.id = instance->id;
    load.open = true;
    load.pending_tokens = instance->pending_tokens;
    load.decoding = instance->generations - instance->pending_prompts;
    load.running = instance->generations;
    load.max_running = instance->room.max_running;
    load.free_kv_tokens = instance->free_kv_tokens - instance->pending_tokens;
    load.pending_patches = instance->pending_patches;
    if (encodes) {
      load.has_output = instance->images.match({&request.what.item_key[action.item], 1}) == 1;
    } else {
      load.cached_tokens = static_cast<int64_t>(instance->prefixes.match(request.what.chain)) * settings_.block_tokens;
    }
    loads[leaving ? kLeaving : instance.get() == failed ? kFailed : own ? kFirst : kAdded].push_back(load);
  }
  std::optional<InstanceId> chosen;
  for (size_t i = 0; i < loads.size() && !chosen.has_value(); ++i) {
    chosen = encodes ? route_encoding(loads[i], request.what.patches[action.item], settings_.costs)
             : action.kind == Do::kPlaceDecoding ? route_decoding(loads[i], request.what.needs)
                                                 : route_generation(loads[i], request.what.needs, settings_.costs);
  }
  return chosen;
}

void Fleet::place_parked(double at_s, Actions& out) {
  for (const Parked& parked : std::exchange(parked_, {})) {
    const auto found = requests_.find(parked.request);
    if (found == requests_.end()) continue;
    if (const auto chosen = choose(*found->second, parked.action); chosen.has_value()) {
      carry_out(parked.request, found->second->life.handle(placed(parked.action, *chosen)), at_s, out);
    } else {
      parked_.push_back(parked);
    }
  }
}

// One after the other: the end of a request takes its other pieces along.
template <typename Which>
void Fleet::end_parked(Which which, double at_s, Actions& out) {
  for (;;) {
    const auto found = std::find_if(parked_.begin(), parked_.end(), which);
    if (found == parked_.end()) return;
    const Parked parked = *found;
    parked_.erase(found);
    const RequestEvent nowhere = {.kind = Tell::kNowhere, .status = missing(asked(parked.action))};
    for (const FleetAction& action : request(parked.request, nowhere, at_s)) out.push_back(action);
  }
}

bool Fleet::is_last(const Instance& instance, bool FleetPool::*does) const {
  return pool_of(instance).*does && std::none_of(instances_.begin(), instances_.end(), [&](const auto& one) {
           return one->open && (pool_of(*one).*does || (does == &FleetPool::encodes && this->encodes(*one)));
         });
}

// Of a draining one: what runs there can go on nowhere else.
bool Fleet::is_last(const Instance& instance) const {
  if (is_last(instance, &FleetPool::encodes) || is_last(instance, &FleetPool::generates) ||
      is_last(instance, &FleetPool::takes_over)) {
    return true;
  }
  // Elsewhere images would have to be encoded again.
  return !any_encodes() && std::any_of(requests_.begin(), requests_.end(), [&](const auto& one) {
    return one.second->what.shape.items > 0 && one.second->uses(instance);
  });
}

// Likewise: requests under way may come to need it. New ones are not taken while nobody else is there, so it ends.
bool Fleet::is_awaited(const Instance& instance) const {
  return !requests_.empty() && (is_last(instance, &FleetPool::generates) || is_last(instance, &FleetPool::takes_over));
}

// What follows from how things stand now, whatever has happened: work that waits for nobody ends; one that is to go,
// and on which nothing is left, goes; the encoder is added where it is missing, and given back where it is not needed
// any more.
void Fleet::settle(double at_s, Actions& out) {
  end_parked([this](const Parked& parked) { return !is_coming(parked.action); }, at_s, out);
  for (const auto& instance : instances_) {
    if (!instance->life.finishes()) continue;
    if (instance->must_move && !is_last(*instance)) {
      instance->must_move = false;
      move_all(*instance, at_s, out);
    }
    if (!instance->life.finishes() || instance->busy() || is_awaited(*instance)) continue;
    const InstanceEvent idle = {.kind = InstanceEvent::Kind::kIdle, .at_s = at_s, .epoch = instance->life.epoch()};
    carry_out(*instance, instance->life.handle(idle), at_s, out);
  }
  give_back(at_s, out);
  add_encoder(at_s, out);
}

Fleet::Actions Fleet::tick(double at_s) {
  Actions out;
  for (const auto& instance : instances_) {
    if (at_s < instance->life.next_tick_s()) continue;
    carry_out(*instance, instance->life.handle({.kind = InstanceEvent::Kind::kTick, .at_s = at_s}), at_s, out);
  }
  end_parked([&](const Parked& parked) { return at_s >= parked.since_s + settings_.park_s; }, at_s, out);
  settle(at_s, out);
  return out;
}

double Fleet::next_tick_s() const {
  double next = next_add_s();
  for (const auto& instance : instances_) {
    next = std::min({next, instance->life.next_tick_s(), instance->unused_since_s + settings_.add_idle_s});
    if (instance->added == AddedEncoder::kAdding) next = std::min(next, instance->added_until_s);
  }
  for (const Parked& parked : parked_) next = std::min(next, parked.since_s + settings_.park_s);
  return next;
}

}  // namespace parvl
