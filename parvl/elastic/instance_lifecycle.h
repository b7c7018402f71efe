// The life of one instance: a process that starts without a role, is given modules, loads and warms them, serves,
// drains and goes, or fails and is started again. A pure state machine: events with times in, actions out; whoever
// supervises processes carries the actions out and tells what became of them.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace parvl {

enum class InstanceState { kStarting, kLoading, kWarming, kReady, kDraining, kFailed, kGone };
inline constexpr std::array<std::string_view, 7> kInstanceStateNames = {"starting", "loading", "warming", "ready",
                                                                        "draining", "failed",  "gone"};

struct InstanceLimits {
  double start_s = 60;                                // from the start of the process to its hello
  double load_s = 1800;                               // from then to all modules loaded
  double warm_s = 300;                                // from then to the first encoding and decoding done
  double heartbeat_s = 3;                             // the longest silence
  double drain_s = 30;                                // for requests to finish where they are; then they move
  double release_s = 10;                              // from the release to the end of the process
  double backoff_first_s = 0.5, backoff_most_s = 30;  // before a start after a failure; doubles with each
  double backoff_forget_s = 60;                       // ready for so long, and the next failure counts as a first one
};

// What computes beside what in one instance: each has steps of its own.
enum class StepLane { kBackbone, kEncoder };
inline constexpr size_t kStepLanes = 2;

struct InstanceEvent {
  enum class Kind {
    kHello,      // its process speaks
    kLoaded,     // all modules that it was assigned
    kWarmed,     // a real encoding and a real decoding are done
    kAlive,      // any other message
    kStepBegan,  // it computes, and must say so within `step_s`
    kStepEnded,  // of the same lane
    kIdle,       // of a draining one: no request is left
    kRefused,    // it cannot do what it was asked, and says why in `reason`
    kAdded,      // what it was to take on beside what it has is loaded and warm; a sign of life, and the fleet's to use
    kAddRefused,  // it cannot, for `reason`, and goes on as before; likewise
    kExited,      // its process has ended
    kDrain,       // somebody wants it gone
    kTick,        // time passes
  };
  Kind kind = Kind::kTick;
  double at_s = 0;    // never earlier than the event before
  int64_t epoch = 0;  // of who speaks; kDrain and kTick have none
  double step_s = 0;
  StepLane lane = StepLane::kBackbone;
  int64_t number = 0;  // kAdded and kAddRefused: of the kAdd that it answers
  std::string reason = {};
};

struct InstanceAction {
  enum class Kind {
    kStart,    // a new process, with this epoch
    kAssign,   // send it its modules
    kWarm,     // let it encode and decode something
    kOpen,     // requests may go there
    kClose,    // no new ones
    kMove,     // what still runs there goes on elsewhere; of a draining one as far as somebody can take it
    kFence,    // nothing of this epoch counts any more: its memory, its messages
    kRelease,  // let it give its modules back and end
    kKill,
    kAdd,       // send it the vision encoder, to hold beside its modules (the fleet's order, as the next one)
    kGiveBack,  // let it give that back
  };
  Kind kind = Kind::kStart;
  int64_t epoch = 0;
  int64_t number = 0;  // kAdd: which one, from 1
  friend bool operator==(const InstanceAction&, const InstanceAction&) = default;
};

// Not thread-safe.
class InstanceLifecycle {
 public:
  explicit InstanceLifecycle(const InstanceLimits& limits = {}) : limits_(limits) {}

  // The first start, with epoch 1. Once, before any event.
  std::vector<InstanceAction> start(double at_s);
  // What follows from an event, in the order to be done. One of a past epoch has no effect but to be counted.
  std::vector<InstanceAction> handle(const InstanceEvent& event);

  InstanceState state() const { return state_; }
  // It takes no new requests, and computes what it has.
  bool finishes() const { return state_ == InstanceState::kDraining && !released_; }
  int64_t epoch() const { return epoch_; }
  int64_t stale_events() const { return stale_; }
  int64_t failures() const { return failures_; }
  const std::string& reason() const { return reason_; }  // of the last failure, a half-sentence
  // When kTick will next have an effect if nothing else comes; infinity: never.
  double next_tick_s() const;

 private:
  using Actions = std::vector<InstanceAction>;
  void enter(InstanceState state, double at_s, double limit_s);
  Actions launch(double at_s);
  Actions fail(double at_s, const std::string& reason);
  Actions drain(double at_s);
  Actions release(double at_s);
  Actions tick(double at_s);
  Actions advance(const InstanceEvent& event);
  double& step_deadline_s(StepLane lane) { return step_deadline_s_[static_cast<size_t>(lane)]; }
  bool lives() const { return state_ != InstanceState::kFailed && state_ != InstanceState::kGone; }
  InstanceAction action(InstanceAction::Kind kind) const { return {kind, epoch_}; }

  static constexpr double kNever = std::numeric_limits<double>::infinity();
  const InstanceLimits limits_;
  InstanceState state_ = InstanceState::kGone;
  int64_t epoch_ = 0, stale_ = 0, failures_ = 0;
  int64_t in_a_row_ = 0;        // failures without a long enough time ready between them
  double since_s_ = 0;          // in this state
  double deadline_s_ = kNever;  // of this state
  double heard_s_ = 0;
  std::array<double, kStepLanes> step_deadline_s_{kNever, kNever};
  bool released_ = false;  // draining, and nothing runs there any more
  bool unwanted_ = false;  // not to be started again
  std::string reason_;
};

}  // namespace parvl
