// What the engine tells a Timeline: a request's way from the engine's queue to its end, each step with what it held,
// each encoding, and the counts of running and waiting. Ids and counts, no content.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "parvl/base/timeline.h"
#include "parvl/sched/executor.h"

namespace parvl {

// One sequence's part of the step in flight.
struct StepPart {
  RequestId id;
  int64_t begin = 0, count = 0;
  bool samples = false;
  bool prefill = false;  // it has given no token yet
};

// A step that the executor has computed.
struct EngineStep {
  int64_t sequences = 0, tokens = 0;
  double seconds = 0;
  bool is_decode() const { return tokens == sequences; }  // one token each
};

// Where a request is, as far as its spans are open.
enum class Phase { kQueue, kBeforePrefill, kPrefill, kDecode };

// Who wants to know what the engine does as it does it. On the engine's thread, of encodings on the encoder's; must not
// block; null: nobody asks.
struct EngineHooks {
  std::function<void(int64_t tokens)> on_submit;   // a step goes to the executor
  std::function<void(const EngineStep&)> on_step;  // it has been computed
  std::function<void()> on_turn;                   // all that this turn of the loop had to tell was told
  std::function<void(int64_t patches)> on_encode;  // the encoder begins with a batch of images
  std::function<void(int64_t patches, double seconds)> on_encoded;
};

// Without a timeline, or while that does not record, nothing happens. One thread, the engine's.
class EngineTrace {
 public:
  explicit EngineTrace(std::shared_ptr<Timeline> timeline);

  void scheduled(double begin_s, double end_s, const SchedulerOutput& output);
  void counts(double at_s, int64_t running, int64_t waiting, double kv_share);
  void step(const Completion& completion, const std::vector<StepPart>& parts);
  void encoded(const Completion& completion, TrackId track, int32_t item, int64_t tokens);
  void kv_fetched(const Completion& completion, TrackId track, int64_t tokens);

  // Of one request. `queued` may come late; the rest in this order, without those of a phase that it does not reach.
  void arrived(TrackId track, double at_s, int64_t prompt_tokens);
  void queued(TrackId track, double arrival_s, double started_s);
  void prefill_begins(TrackId track, double at_s, int64_t cached_tokens);
  void part(TrackId track, const Completion& completion, const StepPart& part);
  void preempted(TrackId track, double at_s);
  void first_token(TrackId track, double at_s);
  void ended(TrackId track, Phase phase, double at_s, int64_t tokens);

 private:
  bool on() const { return timeline_ != nullptr && timeline_->recording(); }

  std::shared_ptr<Timeline> timeline_;
  int loop_lane_ = 0, backbone_lane_ = 0, encoder_lane_ = 0;
  int64_t session_ = 0;                  // the recording that the counts were told to
  int64_t running_ = -1, waiting_ = -1;  // as told last
  double kv_share_ = -1;
};

}  // namespace parvl
