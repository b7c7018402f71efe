#include "parvl/exec/engine_trace.h"

#include <utility>

namespace parvl {
namespace {

constexpr char kGeneration[] = "generation", kPrefill[] = "prefill", kDecode[] = "decode", kQueue[] = "queue";

int64_t count(size_t size) { return static_cast<int64_t>(size); }

}  // namespace

EngineTrace::EngineTrace(std::shared_ptr<Timeline> timeline) : timeline_(std::move(timeline)) {
  if (timeline_ == nullptr) return;
  loop_lane_ = timeline_->add_lane("scheduler");
  backbone_lane_ = timeline_->add_lane("llm_backbone");
  encoder_lane_ = timeline_->add_lane("vision_encoder");
}

void EngineTrace::scheduled(double begin_s, double end_s, const SchedulerOutput& output) {
  if (!on()) return;
  timeline_->lane_span(loop_lane_, "schedule", begin_s, end_s,
                       {{"step", output.step.value},
                        {"sequences", count(output.sequences.size())},
                        {"encodes", count(output.encodes.size())},
                        {"evicted", count(output.evicted.size())},
                        {"preempted", count(output.preempted.size())}});
}

void EngineTrace::counts(double at_s, int64_t running, int64_t waiting, double kv_share) {
  if (!on()) return;
  if (std::exchange(session_, timeline_->session()) != timeline_->session()) {  // a new file knows none of them
    running_ = waiting_ = -1;
    kv_share_ = -1;
  }
  if (std::exchange(running_, running) != running) timeline_->counter("running", at_s, static_cast<double>(running));
  if (std::exchange(waiting_, waiting) != waiting) timeline_->counter("waiting", at_s, static_cast<double>(waiting));
  if (std::exchange(kv_share_, kv_share) != kv_share) timeline_->counter("kv_cache_usage", at_s, kv_share);
}

void EngineTrace::step(const Completion& completion, const std::vector<StepPart>& parts) {
  if (!on()) return;
  int64_t prefills = 0, prefill_tokens = 0, decodes = 0;
  for (const StepPart& part : parts) {
    prefills += part.prefill;
    decodes += !part.prefill;
    prefill_tokens += part.prefill ? part.count : 0;
  }
  const char* name = prefills == 0 ? kDecode : decodes == 0 ? kPrefill : "prefill + decode";
  timeline_->lane_span(backbone_lane_, name, completion.start_s, completion.end_s,
                       {{"step", completion.step.value},
                        {"prefill_sequences", prefills},
                        {"prefill_tokens", prefill_tokens},
                        {"decode_sequences", decodes},
                        {"ok", int64_t{completion.status.ok()}}});
}

void EngineTrace::encoded(const Completion& completion, TrackId track, int32_t item, int64_t tokens) {
  if (!on()) return;
  const LogFields args = {{"item", int64_t{item}}, {"tokens", tokens}, {"ok", int64_t{completion.status.ok()}}};
  const char* name = completion.fetched ? "fetch" : "encode";
  timeline_->lane_span(encoder_lane_, name, completion.start_s, completion.end_s, args);
  timeline_->span(track, name, completion.start_s, completion.end_s, args, "encode");
}

void EngineTrace::kv_fetched(const Completion& completion, TrackId track, int64_t tokens) {
  if (!on()) return;
  timeline_->span(track, "fetch kv", completion.start_s, completion.end_s,
                  {{"tokens", tokens}, {"ok", int64_t{completion.status.ok()}}});
}

void EngineTrace::arrived(TrackId track, double at_s, int64_t prompt_tokens) {
  if (on()) timeline_->begin(track, kGeneration, at_s, {{"prompt_tokens", prompt_tokens}});
}

// Told late, its end may have the time at which prefill began: a nanosecond earlier, they still follow each other.
void EngineTrace::queued(TrackId track, double arrival_s, double started_s) {
  if (on()) timeline_->span(track, kQueue, arrival_s, started_s - 1e-9);
}

void EngineTrace::prefill_begins(TrackId track, double at_s, int64_t cached_tokens) {
  if (on()) timeline_->begin(track, kPrefill, at_s, {{"cached_tokens", cached_tokens}});
}

void EngineTrace::part(TrackId track, const Completion& completion, const StepPart& part) {
  if (!on() || (!part.prefill && part.count == 1)) return;  // a token of decoding is in the step's own span
  timeline_->span(track, part.prefill ? "chunk" : "computed again", completion.start_s, completion.end_s,
                  {{"step", completion.step.value}, {"begin", part.begin}, {"tokens", part.count}});
}

void EngineTrace::preempted(TrackId track, double at_s) {
  if (on()) timeline_->mark(track, "preempted", at_s);
}

void EngineTrace::first_token(TrackId track, double at_s) {
  if (!on()) return;
  timeline_->end(track, kPrefill, at_s);
  timeline_->begin(track, kDecode, at_s);
}

void EngineTrace::ended(TrackId track, Phase phase, double at_s, int64_t tokens) {
  if (!on()) return;
  if (phase == Phase::kPrefill) timeline_->end(track, kPrefill, at_s);
  if (phase == Phase::kDecode) timeline_->end(track, kDecode, at_s);
  timeline_->end(track, kGeneration, at_s, {{"tokens", tokens}});
}

}  // namespace parvl
