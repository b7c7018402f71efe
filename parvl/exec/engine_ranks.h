// An engine whose LLM is cut over several processes: its first rank schedules, chooses tokens and speaks to the world;
// the others take each step as a message, compute their part of it, and meet the first in the collective calls.
// Torch-free.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/comm/communicator.h"
#include "parvl/comm/ring/shared_ring.h"
#include "parvl/exec/backbone_ranks.h"
#include "parvl/exec/encoder_links.h"

namespace parvl {

// The other ranks, as the first one has them.
class EngineRanks {
 public:
  struct Parts {
    std::shared_ptr<void> processes;             // what the other ranks run in; goes last
    std::unique_ptr<Communicator> communicator;  // of all ranks; this is its rank 0
    std::unique_ptr<RingWriter> steps;           // rank r is its reader r − 1
    // Once, on any thread; null: nothing. `loading`: before set_groups, when the first rank may wait for that rank in
    // what nobody can end; then this must not return.
    std::function<void(const absl::Status& why, bool loading)> on_lost;
  };

  explicit EngineRanks(Parts parts) : parts_(std::move(parts)) {}
  ~EngineRanks();  // the others end
  EngineRanks(const EngineRanks&) = delete;
  EngineRanks& operator=(const EngineRanks&) = delete;

  int64_t size() const { return parts_.communicator->world(); }
  std::vector<int64_t> pids() const;  // of all ranks that have come, by rank
  Communicator& communicator() { return *parts_.communicator; }
  // Whose calls end when a rank is lost, as far as their backend can.
  void set_groups(std::shared_ptr<BackboneRanks> groups);
  // To the other ranks' encoders, before set_groups; null: they have none. They are closed when a rank is lost.
  void set_encoders(std::shared_ptr<EncoderLinks> encoders) { encoders_ = std::move(encoders); }
  const std::shared_ptr<EncoderLinks>& encoders() const { return encoders_; }

  // One thread. To all other ranks, in order. Throws std::runtime_error with why they cannot be reached.
  void send(std::string_view message);

  // Any thread. A rank is gone, or stands where the others do not: nothing can be computed any more. The first reason
  // stays.
  void lose(const absl::Status& why);
  // The same for a step that failed with `status`. Gives what health() says from then on, which is the death of a
  // process where that was the cause: its end and the step's are heard of in any order.
  absl::Status lose_for(const absl::Status& status);
  // Any thread. Unavailable once a rank was lost.
  absl::Status health() const;

 private:
  Parts parts_;
  mutable std::mutex mutex_;
  std::condition_variable lost_;
  absl::Status health_;
  std::shared_ptr<BackboneRanks> groups_;  // the communicator's
  std::shared_ptr<EncoderLinks> encoders_;
};

}  // namespace parvl
