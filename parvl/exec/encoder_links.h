// The way of images to the encoders of an engine's other ranks, and of what comes out back to the first: rings of
// shared memory of their own, so that no encoding waits for a step or holds one up. Torch-free.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/comm/communicator.h"
#include "parvl/comm/ring/shared_ring.h"

namespace parvl {

// One rank's ends: the first rank has a link to each other rank, by rank; each other rank one to the first.
class EncoderLinks {
 public:
  // All ranks call it, between the same calls of make_store; waits for the others. `ring_bytes`: of each ring, which
  // longer messages go through in parts.
  static absl::StatusOr<std::shared_ptr<EncoderLinks>> connect(Communicator& ranks,
                                                               int64_t ring_bytes = int64_t{1} << 20);

  size_t size() const { return links_.size(); }
  // One thread a link.
  RingWriter& to(size_t link) { return *links_[link].to; }
  RingReader& from(size_t link) { return *links_[link].from; }
  // Any thread. Ends all that waits here and at the other ends, now and later, with Unavailable.
  void close();

 private:
  struct Link {
    std::unique_ptr<RingWriter> to;
    std::unique_ptr<RingReader> from;
  };
  std::vector<Link> links_;
};

}  // namespace parvl
