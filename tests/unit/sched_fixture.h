// For tests of the scheduler: small requests, and an executor that always says 7.
#pragma once

#include <utility>
#include <vector>

#include "parvl/sched/scheduler.h"

namespace parvl {

inline MediaKey key_of(uint8_t n) {
  MediaKey key;
  key.bytes[0] = n;
  return key;
}

inline SchedRequest make_request(int64_t id, int64_t tokens, std::vector<MediaItem> media = {}, int priority = 0,
                                 TokenId first = 0) {
  SchedRequest out;
  out.id = RequestId{id};
  out.priority = priority;
  for (int64_t i = 0; i < tokens; ++i) out.prompt.push_back(first + static_cast<TokenId>(i));
  out.media = std::move(media);
  return out;
}

inline MediaItem image(uint8_t key, int64_t begin, int64_t length, int64_t bytes = 100) {
  return {key_of(key), Modality::kImage, begin, length, /*cost=*/4 * length, bytes};
}

inline SchedulerConfig small_config() {
  SchedulerConfig c;
  c.block_size = 4;
  c.num_blocks = 16;
  c.max_model_len = 64;
  c.max_batched_tokens = 16;
  c.max_seqs = 4;
  c.encode_budget = {64, 64, 64};
  c.encoder_cache_bytes = 300;
  return c;
}

// Gives every sampled position the token 7.
inline void commit_sevens(Scheduler& scheduler, const SchedulerOutput& output) {
  if (output.sequences.empty()) return;
  StepTokens tokens{output.step, {}};
  for (const SequenceWork& work : output.sequences) {
    if (work.samples) tokens.tokens.push_back(7);
  }
  scheduler.commit(tokens);
}

}  // namespace parvl
