// One step as data: what the executor is to compute, and what it answers.
#pragma once

#include <cstdint>
#include <vector>

#include "parvl/base/ids.h"

namespace parvl {

// Encoder output that a step's tokens read: item `item` of the request, in slot `slot`.
struct MediaUse {
  int32_t item = 0;
  SlotId slot;
};

// Tokens [begin, begin + count) of a sequence (prompt and output together) go through the model; their keys and values
// go to the places that `blocks` gives positions begin and later. Those before `begin` are there already.
struct SequenceWork {
  RequestId id;
  int64_t begin = 0;
  int64_t count = 0;
  bool samples = false;         // the last of them is the sequence's last: a token is to be chosen after it
  std::vector<BlockId> blocks;  // the sequence's whole table
  std::vector<MediaUse> media;  // the items whose placeholders lie among these tokens
};

// Item `item` of the request goes through its encoder into slot `slot`.
struct EncodeWork {
  SlotId slot;
  RequestId id;
  int32_t item = 0;
};

// Keys and values of a sequence's tokens [begin, begin + count) come from where they were computed to the places that
// `blocks` gives them. Those before `begin` are there already; it is a whole number of blocks.
struct KvFetch {
  RequestId id;
  int64_t begin = 0;
  int64_t count = 0;
  std::vector<BlockId> blocks;  // the sequence's whole table
};

struct SchedulerOutput {
  StepId step;
  std::vector<SequenceWork> sequences;  // empty: nothing to compute now
  std::vector<EncodeWork> encodes;      // started before the step; each reports by itself
  std::vector<KvFetch> kv_fetches;      // likewise
  std::vector<SlotId> evicted;          // encoder outputs that nobody will read again
  std::vector<RequestId> preempted;     // lost their blocks; they come again later
};

struct StepTokens {
  StepId step;
  std::vector<TokenId> tokens;  // of the sequences that `sample`, in the step's order
  double seconds = 0;           // that the step took; 0: not known
};

}  // namespace parvl
