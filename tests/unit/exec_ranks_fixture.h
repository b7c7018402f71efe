// An engine whose LLM is cut over ranks that are threads of this process.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "parvl/comm/local/local_group.h"
#include "parvl/exec/engine_ranks.h"
#include "tests/unit/exec_engine_fixture.h"

namespace parvl {

// The ranks but the first. Each ends when the first one's ring is closed.
class RankThreads {
 public:
  RankThreads(const std::string& ring, std::vector<std::unique_ptr<Communicator>> communicators)
      : communicators_(std::move(communicators)), ends_(communicators_.size()) {
    for (size_t i = 0; i < communicators_.size(); ++i) {
      threads_.emplace_back([this, ring, i] {
        auto steps = RingReader::open(ring, static_cast<int64_t>(i));
        ends_[i] = steps.ok() ? run_engine_rank(*communicators_[i], **steps, clock_) : steps.status();
      });
    }
  }
  ~RankThreads() {
    for (std::thread& thread : threads_) thread.join();
    for (const absl::Status& end : ends_) EXPECT_TRUE(end.ok() || expect_failure) << end;
  }
  bool expect_failure = false;

 private:
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<absl::Status> ends_;
  const RealClock clock_;
  std::vector<std::thread> threads_;
};

// Ranks that are threads, `options.ranks()` of them.
struct RankWorld {
  // Around the communicator of each rank, when there is something to watch; may be empty.
  std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)> around;
  RankThreads** made = nullptr;  // where the threads are to be seen; may be null
};
inline EngineOptions over_ranks(EngineOptions options, const RankWorld& world) {
  options.start_ranks = [ranks = options.ranks(), world]() -> absl::StatusOr<std::unique_ptr<EngineRanks>> {
    auto communicators = make_local_communicators(ranks, {.deadline_s = 20});
    if (world.around) {
      for (auto& one : communicators) one = world.around(std::move(one));
    }
    EngineRanks::Parts parts;
    parts.communicator = std::move(communicators.front());
    communicators.erase(communicators.begin());
    PARVL_ASSIGN_OR_RETURN(parts.steps, RingWriter::create(ranks - 1, 4096));  // less than a long step
    auto threads = std::make_shared<RankThreads>(parts.steps->path(), std::move(communicators));
    if (world.made != nullptr) *world.made = threads.get();
    parts.processes = threads;
    return std::make_unique<EngineRanks>(std::move(parts));
  };
  return options;
}

// Cut by tensors.
inline EngineOptions over_ranks(EngineOptions options, int64_t ranks, RankThreads** made = nullptr) {
  options.tensor_ranks = ranks;
  return over_ranks(std::move(options), RankWorld{{}, made});
}
// By tensors and layers, every step in as many micro batches as there are stages.
inline EngineOptions over_stages(EngineOptions options, int64_t tensor, int64_t stages, const RankWorld& world = {}) {
  options.tensor_ranks = tensor;
  options.pipeline_stages = stages;
  if (options.micro_batch_tokens == 0) options.micro_batch_tokens = 1;
  return over_ranks(std::move(options), world);
}

}  // namespace parvl
