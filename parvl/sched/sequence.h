// One request while the scheduler has it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "parvl/sched/request.h"

namespace parvl {

// Why a waiting sequence could not start: while that holds, its prefix is not looked up again.
struct LackOfMemory {
  int64_t prefix_blocks = 0;   // that the prefix cache had
  int64_t free_in_prefix = 0;  // of these: held by nobody, so that taking them leaves fewer for the rest
  int64_t missing = 0;         // blocks for what it was to compute
  std::string next_key;        // of the first block that was not there; "": there was none to look for
};

struct Sequence {
  SchedRequest request;         // its prompt is in `tokens`
  double arrival = 0;           // seconds; kept through preemptions
  std::vector<TokenId> tokens;  // prompt and output
  double waiting_since = 0;
  bool running = false;
  bool promoted = false;  // has waited too long: before all others from now on
  bool admitted = false;  // has run before

  int64_t computed = 0;   // tokens whose keys and values are in the blocks
  int64_t in_flight = 0;  // tokens of the step in flight
  bool samples = false;   // that step gives a token
  bool fetching = false;  // what is given is on its way into the blocks, which nobody may take meanwhile
  bool ended = false;     // finished while in flight or fetching: erased at commit
  std::vector<BlockId> blocks;
  int64_t published = 0;             // how many of the blocks have been offered to the prefix cache
  uint64_t last_content = 0;         // of the last published block, the parent of the next
  std::vector<bool> pinned;          // by item: holds a pin of its encoder output
  std::optional<LackOfMemory> lack;  // while it waits

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  // Whether what is given still has to come: more than the blocks hold.
  bool lacks_given() const { return request.given > computed; }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks.size()); }
};

// The order of turns, and the reverse of who gives way.
inline bool goes_before(const Sequence& a, const Sequence& b) {
  const auto rank = [](const Sequence& s) {
    return std::tuple(!s.promoted, s.promoted ? 0 : s.request.priority, s.arrival, s.request.id);
  };
  return rank(a) < rank(b);
}

}  // namespace parvl
