#include "parvl/elastic/request_lifecycle.h"

#include <algorithm>
#include <utility>

#include "parvl/base/check.h"

namespace parvl {

using Kind = RequestEvent::Kind;
using Do = RequestAction::Kind;

RequestLifecycle::RequestLifecycle(const RequestShape& shape)
    : shape_(shape), items_(shape.items), choices_(shape.choices) {
  PARVL_CHECK(shape.choices > 0, "a request without choices");
}

std::optional<InstanceId> RequestLifecycle::holder(size_t item) const {
  const Item& it = items_[item];
  return it.where == Where::kThere ? std::optional(it.instance) : std::nullopt;
}

void RequestLifecycle::let_go_all(Actions& out) {
  for (size_t i = 0; i < items_.size(); ++i) {
    if (items_[i].where != Where::kThere) continue;
    items_[i].where = Where::kNowhere;
    out.push_back({.kind = Do::kLetGo, .instance = items_[i].instance, .item = i, .attempt = items_[i].attempt});
  }
  if (const auto kv = std::exchange(kv_, std::nullopt); kv.has_value()) {
    out.push_back({.kind = Do::kLetGoKv, .instance = kv->instance, .attempt = kv->attempt});
  }
}

std::vector<RequestAction> RequestLifecycle::end(absl::Status status) {
  Actions out;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (items_[i].where != Where::kRunning) continue;
    items_[i].where = Where::kNowhere;
    out.push_back(
        {.kind = Do::kCancelEncoding, .instance = items_[i].instance, .item = i, .attempt = items_[i].attempt});
  }
  let_go_all(out);
  if (std::exchange(generation_.where, Where::kNowhere) == Where::kRunning) {
    out.push_back({.kind = Do::kCancelGeneration, .instance = generation_.instance, .attempt = generation_.attempt});
  }
  ended_ = true;
  out.push_back({.kind = Do::kEnd, .status = std::move(status)});
  return out;
}

// For the first time, or again because of `why`.
std::vector<RequestAction> RequestLifecycle::encode(size_t item, const absl::Status& why) {
  Item& it = items_[item];
  if (it.attempt - it.uncounted == shape_.max_encodings) return end(why);
  it.where = Where::kAsked;
  ++it.attempt;
  return {{.kind = Do::kPlaceEncoding, .item = item, .attempt = it.attempt}};
}

std::vector<RequestAction> RequestLifecycle::generate(const absl::Status& why) {
  if (generation_.attempt - generation_.uncounted == shape_.max_generations) return end(why);
  generation_.where = Where::kAsked;
  ++generation_.attempt;
  has_begun_ = is_refetch_ = false;
  return {{.kind = kv_.has_value() ? Do::kPlaceDecoding : Do::kPlaceGeneration, .attempt = generation_.attempt}};
}

std::vector<RequestAction> RequestLifecycle::encode_missing() {
  Actions out;
  for (size_t i = 0; i < items_.size() && !ended_; ++i) {
    if (items_[i].where != Where::kNowhere) continue;
    for (RequestAction& action :
         encode(i, absl::UnavailableError("an image was encoded too often and lost each time"))) {
      out.push_back(std::move(action));
    }
  }
  return out;
}

// Whatever is missing for the generation first.
std::vector<RequestAction> RequestLifecycle::go_on() {
  Actions out;
  if (!kv_.has_value()) out = encode_missing();
  if (ended_ || generation_.where != Where::kNowhere) return out;
  const auto is_there = [](const Item& item) { return item.where == Where::kThere; };
  if (!kv_.has_value() && !std::all_of(items_.begin(), items_.end(), is_there)) return out;
  for (RequestAction& action : generate(absl::UnavailableError("its instances were lost too often"))) {
    out.push_back(std::move(action));
  }
  return out;
}

std::vector<RequestAction> RequestLifecycle::start() { return go_on(); }

bool RequestLifecycle::is_current(const Item& item, const RequestEvent& event, Where where) const {
  return item.where == where && item.attempt == event.attempt;
}

bool RequestLifecycle::generates(const RequestEvent& event) const {
  return is_current(generation_, event, Where::kRunning) && event.choice < choices_.size() &&
         !choices_[event.choice].finished;
}

// With the first token of an attempt the generating instance has taken all over that lies elsewhere. Of one that is to
// go on on another, that one may need the images still.
std::vector<RequestAction> RequestLifecycle::take_token(const RequestEvent& event) {
  Choice& choice = choices_[event.choice];
  if (event.index != choice.delivered) return {};
  ++choice.delivered;
  has_begun_ = true;
  Actions out = {{.kind = Do::kDeliver, .choice = event.choice, .attempt = event.attempt}};
  if (!hands_over_) let_go_all(out);
  return out;
}

std::vector<RequestAction> RequestLifecycle::take_finish(const RequestEvent& event) {
  choices_[event.choice].finished = true;
  const auto is_finished = [](const Choice& choice) { return choice.finished; };
  if (!std::all_of(choices_.begin(), choices_.end(), is_finished)) return {};
  generation_.where = Where::kNowhere;  // nothing to cancel
  return end(absl::OkStatus());
}

std::vector<RequestAction> RequestLifecycle::lose(InstanceId instance) {
  const auto is_there = [&](const Item& item) {
    return item.instance == instance && (item.where == Where::kRunning || item.where == Where::kThere);
  };
  const bool kv_lost = kv_.has_value() && kv_->instance == instance;
  if (kv_lost) kv_.reset();
  bool lost = kv_lost && generation_.where != Where::kRunning;
  for (Item& item : items_) {
    // What a running generation may have taken over already is needed again only if that is lost, too; and nothing is
    // while there are keys and values.
    if (!is_there(item)) continue;
    item.where = Where::kNowhere;
    lost = lost || (generation_.where != Where::kRunning && !kv_.has_value());
  }
  if (is_there(generation_)) {
    generation_.where = Where::kNowhere;
    lost = true;
  } else if (generation_.where == Where::kAsked && lost) {
    generation_.where = Where::kNowhere;  // asked for again once its images are there
  }
  return lost ? go_on() : Actions{};
}

// An attempt that has begun fails because what it needs was not there the second time.
void RequestLifecycle::count_no_try() {
  if (!has_begun_ || std::exchange(is_refetch_, true)) return;
  ++generation_.uncounted;
  for (Item& item : items_) ++item.uncounted;  // all of them are encoded again
}

std::vector<RequestAction> RequestLifecycle::take_kv_lost(const RequestEvent& event) {
  if (!is_current(generation_, event, Where::kRunning)) return {};
  count_no_try();
  const auto kv = std::exchange(kv_, std::nullopt);
  if (!kv.has_value()) return {};
  return {{.kind = Do::kLetGoKv, .instance = kv->instance, .attempt = kv->attempt}};
}

std::vector<RequestAction> RequestLifecycle::take_place(const RequestEvent& event) {
  if (!is_current(generation_, event, Where::kAsked)) return {};
  generation_.where = Where::kRunning;
  generation_.instance = event.instance;
  hands_over_ = event.hands_over && !kv_.has_value();
  return {
      {.kind = kv_.has_value() ? Do::kDecode : Do::kGenerate, .instance = event.instance, .attempt = event.attempt}};
}

// Of an attempt that has moved on, it is late, and the next one will see for itself.
std::vector<RequestAction> RequestLifecycle::take_output_lost(const RequestEvent& event) {
  if (event.item >= items_.size() || !is_current(generation_, event, Where::kRunning)) return {};
  count_no_try();
  Item& item = items_[event.item];
  if (item.where != Where::kThere) return {};
  item.where = Where::kNowhere;
  RequestAction out = {.kind = Do::kLetGo, .instance = item.instance, .item = event.item, .attempt = item.attempt};
  out.lost = true;
  return {out};
}

std::vector<RequestAction> RequestLifecycle::handle(const RequestEvent& event) {
  if (ended_) return {};
  const bool has_item = event.item < items_.size();
  switch (event.kind) {
    case Kind::kEncodingPlaced: {
      if (!has_item || !is_current(items_[event.item], event, Where::kAsked)) return {};
      items_[event.item].where = Where::kRunning;
      items_[event.item].instance = event.instance;
      return {{.kind = Do::kEncode, .instance = event.instance, .item = event.item, .attempt = event.attempt}};
    }
    case Kind::kEncoded:
      if (!has_item || !is_current(items_[event.item], event, Where::kRunning)) return {};
      items_[event.item].where = Where::kThere;
      return go_on();
    case Kind::kEncodingFailed:
      if (!has_item || !is_current(items_[event.item], event, Where::kRunning)) return {};
      items_[event.item].where = Where::kNowhere;
      return absl::IsUnavailable(event.status) ? encode(event.item, event.status) : end(event.status);
    case Kind::kOutputLost:
      return take_output_lost(event);
    case Kind::kGenerationPlaced:
      return take_place(event);
    case Kind::kPrefilled:
      if (!is_current(generation_, event, Where::kRunning) || !hands_over_) return {};
      kv_ = {generation_.instance, generation_.attempt};
      generation_.where = Where::kNowhere;
      ++generation_.uncounted;  // the other half is the same try
      return go_on();
    case Kind::kKvLost:
      return take_kv_lost(event);
    case Kind::kToken:
      return generates(event) ? take_token(event) : Actions{};
    case Kind::kFinished:
      return generates(event) ? take_finish(event) : Actions{};
    case Kind::kGenerationFailed: {
      if (!is_current(generation_, event, Where::kRunning)) return {};
      generation_.where = Where::kNowhere;
      if (!absl::IsUnavailable(event.status)) return end(event.status);
      return generation_.attempt - generation_.uncounted == shape_.max_generations ? end(event.status) : go_on();
    }
    case Kind::kInstanceLost:
      return lose(event.instance);
    case Kind::kNowhere:
    case Kind::kTimeUp:
      return end(event.status);
    case Kind::kLeft:
      return end(absl::CancelledError("the client has left"));
  }
  return {};
}

}  // namespace parvl
