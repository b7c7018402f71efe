// Decides what each step computes. Pure: counts and ids in, a SchedulerOutput out; no clock, no threads, no tensors.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/sched/block_manager.h"
#include "parvl/sched/encoder_cache.h"
#include "parvl/sched/output.h"
#include "parvl/sched/request.h"
#include "parvl/sched/sequence.h"
#include "parvl/sched/step_pace.h"

namespace parvl {

struct SchedulerConfig {
  int64_t block_size = 16;    // tokens a block
  int64_t num_blocks = 1024;  // of KV memory
  int64_t max_model_len = 2048;
  int64_t max_batched_tokens = 2048;  // a step's tokens; at least max_seqs
  int64_t max_seqs = 64;              // running at once
  // The cost that may be encoded between two steps, by modality; one item always may, however large.
  std::array<int64_t, kModalities> encode_budget = {8192, 8192, 8192};
  int64_t encoder_cache_bytes = int64_t{1} << 30;
  bool prefix_caching = true;
  double starvation_s = 10;  // after so long a waiting request goes before all priorities
  // What few steps that answers wait for should exceed: of prompts they get as many tokens as fit. 0: no bound.
  double step_s = 0;
};
// OK, or one sentence naming the value that makes no sense.
absl::Status validate(const SchedulerConfig& config);

struct SchedulerStats {
  int64_t running = 0, waiting = 0;
  int64_t blocks = 0, blocks_used = 0;                // used: held by sequences
  int64_t free_kv_tokens = 0;                         // whose keys and values would find room: all but those held
  int64_t pending_tokens = 0;                         // that are here and not computed yet
  int64_t encoder_bytes = 0, encoder_bytes_used = 0;  // of the encoder cache
  int64_t encoder_bytes_held = 0;                     // of these, what is on its way or somebody still needs
  int64_t preemptions = 0;                            // since the start, as are those below
  int64_t prefix_queries = 0, prefix_hits = 0;        // tokens of admitted prompts; those found in the cache
  int64_t block_lookups = 0;                          // blocks that were looked up in the prefix cache
  int64_t encoder_queries = 0, encoder_hits = 0;      // items that were needed; those that were there or on their way
  int64_t kv_fetched = 0, kv_fetched_tokens = 0;      // sequences, and their tokens, whose KV came from elsewhere
  int64_t kv_fetch_failures = 0;                      // sequences whose KV did not, and is computed here
};

// A request waits (holding nothing), runs (holding blocks and pins of encoder outputs), perhaps waits again after a
// preemption (it is computed again, its tokens kept), and ends by `finish` or a failed encoding. One whose keys and
// values are given runs first to fetch them: it is in no step and gives way to nobody until they have come or not; if
// not, and after a preemption, it is computed like any other. At most one step is in flight. Not thread-safe; the
// caller owns the loop:
//
//   add / finish ... ; output = schedule(now); [executor runs it]; commit(output.step, tokens); finish those that ended
class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);
  ~Scheduler();

  // InvalidArgument naming the limit for a request that could never run: a prompt that leaves no room for a token, more
  // tokens than the KV memory holds, or an item over the encoder cache.
  absl::Status add(SchedRequest request, double now);
  // The end of a request for whatever reason; frees all it holds at once, or at commit while its step is in flight.
  // Unknown ids are ignored.
  void finish(RequestId id);

  // The next step and the encodings to start now. No step may be in flight. `now` in seconds, never going back.
  SchedulerOutput schedule(double now);
  // The step's results: a token for each sequence that `samples`.
  void commit(const StepTokens& tokens);
  // A failed step: its sequences end. Gives their ids.
  std::vector<RequestId> commit_failed(StepId step);
  // An encoding came to its end. When it failed, the requests that need it end; gives their ids.
  std::vector<RequestId> commit_encode(SlotId slot, bool ok);

  // What was given has come, or not: of each of SchedulerOutput::kv_fetches, once.
  void commit_kv(RequestId id, bool ok);

  // What the calls above take for granted of their caller; who tells it what a file says asks first.
  bool knows(RequestId id) const { return by_id_.contains(id); }
  bool in_flight() const { return in_flight_; }
  bool encodes(SlotId slot) const { return encoder_cache_.pending(slot); }
  bool fetches(RequestId id) const;
  absl::Status check_step(StepId step) const;                 // that it is the one in flight
  absl::Status check_tokens(const StepTokens& tokens) const;  // that, and its tokens are as many as they should be

  bool idle() const { return by_id_.empty(); }
  SchedulerStats stats() const;
  const SchedulerConfig& config() const { return config_; }
  // For tests: every count agrees with every other.
  void check_invariants() const;

 private:
  using Sequences = std::vector<Sequence*>;
  // scheduler.cc: whose turn it is.
  void promote_starving(double now);
  void schedule_running(SchedulerOutput& output);
  void schedule_waiting(SchedulerOutput& output);
  bool make_place(const Sequence& sequence, SchedulerOutput& output);
  int64_t part_for(const Sequence& sequence, const Sequence* next) const;
  void give_rest(SchedulerOutput& output);
  bool schedule_tokens(Sequence& sequence, int64_t most, SchedulerOutput& output);
  bool fetch_given(Sequence& sequence, SchedulerOutput& output);
  int64_t count_ready(Sequence& sequence, int64_t wanted, SchedulerOutput& output);
  bool require_encoded(Sequence& sequence, size_t item, bool urgent, SchedulerOutput& output);
  void preempt(Sequence& sequence, SchedulerOutput& output);
  void tell_pace(double seconds);
  void advance(Sequence& sequence);

  // scheduler_memory.cc: what sequences hold.
  enum class Wanted { kPlace, kBlocks, kEncoderBytes };
  Sequence* victim_for(const Sequence& sequence, Wanted wanted) const;
  bool lacks_memory_still(const Sequence& sequence);
  LackOfMemory start_from_prefix_cache(Sequence& sequence);
  bool grow(Sequence& sequence, int64_t tokens, SchedulerOutput& output);
  void publish_full_blocks(Sequence& sequence);
  void unpin_computed(Sequence& sequence);
  void release_all(Sequence& sequence);
  void erase(Sequence& sequence);
  std::string block_key(const Sequence& sequence, int64_t index, uint64_t parent) const;

  SchedulerConfig config_;
  BlockManager blocks_;
  EncoderCache encoder_cache_;
  absl::flat_hash_map<RequestId, std::unique_ptr<Sequence>> by_id_;
  Sequences waiting_, running_;  // each in the order of goes_before
  Sequences in_step_;            // the step in flight, in its order
  StepId last_step_;
  bool in_flight_ = false;
  StepPace pace_;
  int64_t answers_ = 0;                             // in the step in flight: sequences that waited for one token
  int64_t tokens_left_ = 0;                         // of this step's budget
  std::array<int64_t, kModalities> encode_left_{};  // the same
  SchedulerStats counts_;                           // those since the start
};

}  // namespace parvl
