// What a source and a sink have moved and refused.
#pragma once

#include <cstdint>

namespace parvl {

struct LaneCounters {
  int64_t items = 0;
  int64_t bytes = 0;
};

struct TransferSourceCounters {
  int64_t published_items = 0, published_bytes = 0;
  LaneCounters shared_memory, tcp;  // given to readers: shared memory when asked for, TCP when sent

  // Now, in bytes of memory.
  int64_t items = 0;              // reserved, published or quarantined
  int64_t used_bytes = 0;         // by them
  int64_t quarantined_bytes = 0;  // part of it: dropped, but a reader has it
  int64_t free_bytes = 0;         // kept for the next items; used and free together stay within the arena
  int64_t connections = 0;

  int64_t given_up_bytes = 0;  // left to readers that were cut off while they had it
  int64_t expired_items = 0;   // whose lease ended
  int64_t fenced = 0;          // connections cut off by `fence`, or because they kept dropped memory
  int64_t stale = 0;           // refused: another epoch of the source, or a fenced reader
  int64_t strangers = 0;       // refused: a wrong token or another source's name
  int64_t missing = 0;         // pulls of items that were not there
  int64_t malformed = 0;       // connections closed because of what came over them
  int64_t silent = 0;          // connections closed because nothing came or went for too long
  int64_t too_many = 0;        // connections refused because there were too many
  int64_t credit_waits = 0;    // times that a TCP reader's credit was used up
};

struct TransferSinkCounters {
  LaneCounters shared_memory, tcp;
  int64_t views = 0;         // of shared memory, now
  int64_t mapped_bytes = 0;  // now
  int64_t fallbacks = 0;     // TCP was used although source and sink are on one host
  int64_t damaged = 0;       // checksums that did not match
  int64_t failed = 0;        // pulls that ended with an error, damaged ones among them
};

}  // namespace parvl
