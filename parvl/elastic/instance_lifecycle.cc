#include "parvl/elastic/instance_lifecycle.h"

#include <algorithm>
#include <cmath>

#include "parvl/base/check.h"

namespace parvl {

using Kind = InstanceEvent::Kind;
using Do = InstanceAction::Kind;
using State = InstanceState;

void InstanceLifecycle::enter(State state, double at_s, double limit_s) {
  state_ = state;
  since_s_ = at_s;
  deadline_s_ = at_s + limit_s;
}

std::vector<InstanceAction> InstanceLifecycle::launch(double at_s) {
  ++epoch_;
  heard_s_ = at_s;
  step_deadline_s_.fill(kNever);
  released_ = false;
  enter(State::kStarting, at_s, limits_.start_s);
  return {action(Do::kStart)};
}

std::vector<InstanceAction> InstanceLifecycle::start(double at_s) {
  PARVL_CHECK(epoch_ == 0, "an instance that has started before");
  return launch(at_s);
}

// It is fenced before its requests move, so that nothing it may still say or write meets what they do elsewhere.
std::vector<InstanceAction> InstanceLifecycle::fail(double at_s, const std::string& reason) {
  Actions out;
  const bool was_open = state_ == State::kReady;
  const bool served = was_open || (state_ == State::kDraining && !released_);
  if (was_open && at_s - since_s_ >= limits_.backoff_forget_s) in_a_row_ = 0;
  if (was_open) out.push_back(action(Do::kClose));
  out.push_back(action(Do::kFence));
  if (served) out.push_back(action(Do::kMove));
  out.push_back(action(Do::kKill));
  reason_ = reason;
  ++failures_;
  step_deadline_s_.fill(kNever);
  if (unwanted_) {
    enter(State::kGone, at_s, kNever);
  } else {
    const double wait_s = limits_.backoff_first_s * std::exp2(static_cast<double>(std::min<int64_t>(in_a_row_, 32)));
    ++in_a_row_;
    enter(State::kFailed, at_s, std::min(limits_.backoff_most_s, wait_s));
  }
  return out;
}

std::vector<InstanceAction> InstanceLifecycle::release(double at_s) {
  released_ = true;
  step_deadline_s_.fill(kNever);
  enter(State::kDraining, at_s, limits_.release_s);
  return {action(Do::kRelease)};
}

// One that does not serve yet has nothing to finish.
std::vector<InstanceAction> InstanceLifecycle::drain(double at_s) {
  if (unwanted_) return {};
  unwanted_ = true;
  if (state_ == State::kFailed) {
    enter(State::kGone, at_s, kNever);
    return {};
  }
  if (state_ != State::kReady) return release(at_s);
  enter(State::kDraining, at_s, limits_.drain_s);
  return {action(Do::kClose)};
}

std::vector<InstanceAction> InstanceLifecycle::tick(double at_s) {
  if (at_s < next_tick_s()) return {};
  if (state_ == State::kFailed) return launch(at_s);
  if (at_s >= *std::min_element(step_deadline_s_.begin(), step_deadline_s_.end()))
    return fail(at_s, "a step took too long");
  // A process that has not spoken yet is held to its start alone; one that ends owes no more words.
  if (state_ != State::kStarting && !released_ && at_s >= heard_s_ + limits_.heartbeat_s) {
    return fail(at_s, "nothing was heard of it");
  }
  if (state_ == State::kStarting) return fail(at_s, "its process did not speak in time");
  if (state_ == State::kLoading) return fail(at_s, "its modules were not loaded in time");
  if (state_ == State::kWarming) return fail(at_s, "it was not warm in time");
  PARVL_CHECK(state_ == State::kDraining, "only a ready or ended instance has no limit of time");
  if (released_) return fail(at_s, "its process did not end in time");
  deadline_s_ = kNever;
  return {action(Do::kMove)};
}

// From its own words.
std::vector<InstanceAction> InstanceLifecycle::advance(const InstanceEvent& event) {
  const double at_s = event.at_s;
  heard_s_ = at_s;
  switch (event.kind) {
    case Kind::kHello:
      if (state_ != State::kStarting) return {};
      enter(State::kLoading, at_s, limits_.load_s);
      return {action(Do::kAssign)};
    case Kind::kLoaded:
      if (state_ != State::kLoading) return {};
      enter(State::kWarming, at_s, limits_.warm_s);
      return {action(Do::kWarm)};
    case Kind::kWarmed:
      if (state_ != State::kWarming) return {};
      enter(State::kReady, at_s, kNever);
      return {action(Do::kOpen)};
    case Kind::kStepBegan:
      if (!released_) step_deadline_s(event.lane) = at_s + event.step_s;
      return {};
    case Kind::kStepEnded:
      step_deadline_s(event.lane) = kNever;
      return {};
    case Kind::kIdle:
      return state_ == State::kDraining && !released_ ? release(at_s) : Actions{};
    case Kind::kRefused:
      return fail(at_s, event.reason);
    case Kind::kExited:
      if (!released_) return fail(at_s, event.reason.empty() ? "its process ended" : event.reason);
      enter(State::kGone, at_s, kNever);
      return {action(Do::kFence)};
    case Kind::kAlive:
    case Kind::kAdded:
    case Kind::kAddRefused:
    case Kind::kDrain:
    case Kind::kTick:
      break;
  }
  return {};
}

std::vector<InstanceAction> InstanceLifecycle::handle(const InstanceEvent& event) {
  if (event.kind == Kind::kTick) return tick(event.at_s);
  if (event.kind == Kind::kDrain) return lives() || state_ == State::kFailed ? drain(event.at_s) : Actions{};
  if (event.epoch != epoch_ || !lives()) {
    if (event.kind != Kind::kExited) ++stale_;  // that a killed one ends is no word of its own
    return {};
  }
  return advance(event);
}

double InstanceLifecycle::next_tick_s() const {
  const bool must_speak = lives() && state_ != State::kStarting && !released_;
  const double step_s = *std::min_element(step_deadline_s_.begin(), step_deadline_s_.end());
  return std::min({deadline_s_, step_s, must_speak ? heard_s_ + limits_.heartbeat_s : kNever});
}

}  // namespace parvl
