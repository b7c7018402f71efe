#include "apps/rank_processes.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include <mutex>
#include <utility>

#include "parvl/comm/gloo/gloo_communicator.h"
#include "parvl/launch/children.h"
#include "parvl/launch/work_watch.h"

namespace parvl {
namespace {

constexpr double kFirstStepS = 60, kFirstImageS = 120;  // while nothing is known

class RankProcesses {
 public:
  RankProcesses(const RankProcessOptions& options, int64_t ranks)
      : options_(options), ranks_(ranks), children_([this](Children::Key rank, const std::string& how) {
          lose(absl::StrCat("rank ", rank, " of the ", ranks_, " that compute together ", how));
        }) {}

  void start(const std::string& ring, int64_t port) {
    for (int64_t rank = 1; rank < ranks_; ++rank) {
      ChildCommand command;
      command.arguments = {options_.program,     "rank",   "--rank", absl::StrCat(rank), "--ranks",
                           absl::StrCat(ranks_), "--ring", ring,     "--port",           absl::StrCat(port)};
      command.environment = {{"OMP_NUM_THREADS", "1"}};  // on the CPU all ranks wait for the slowest
      children_.start(rank, std::move(command));
    }
  }

  // From here on it hears of ends. Null: no longer.
  void set_engine(EngineRanks* engine) {
    std::lock_guard lock(mutex_);
    engine_ = engine;
    started_ = true;
  }

  // Nothing can be computed any more; a call that waits for one of them ends with their processes.
  void lose(const std::string& why) {
    const absl::Status status = absl::UnavailableError(why);
    std::lock_guard lock(mutex_);
    if (!started_) return options_.on_lost(status, /*loading=*/true);
    if (engine_ == nullptr) return;
    engine_->lose(status);
    for (int64_t rank = 1; rank < ranks_; ++rank) children_.kill(rank);
  }

 private:
  const RankProcessOptions options_;
  const int64_t ranks_;
  std::mutex mutex_;
  EngineRanks* engine_ = nullptr;
  bool started_ = false;
  Children children_;  // last: it tells while it lives
};

absl::StatusOr<std::unique_ptr<EngineRanks>> start(const std::shared_ptr<RankProcesses>& processes, int64_t ranks,
                                                   const RankProcessOptions& options) {
  EngineRanks::Parts parts;
  PARVL_ASSIGN_OR_RETURN(parts.steps, RingWriter::create(ranks - 1));
  // Whoever still holds them then says nothing to an engine that is no more.
  parts.processes = std::shared_ptr<void>(nullptr, [processes](void*) { processes->set_engine(nullptr); });
  GlooOptions gloo;
  gloo.world = ranks;
  gloo.on_listening = [&](int64_t port) { processes->start(parts.steps->path(), port); };
  PARVL_ASSIGN_OR_RETURN(parts.communicator, make_gloo_communicator(gloo));
  parts.on_lost = options.on_lost;
  auto out = std::make_unique<EngineRanks>(std::move(parts));
  processes->set_engine(out.get());
  return out;
}

}  // namespace

void use_rank_processes(EngineOptions& engine, const RankProcessOptions& options, const Clock& clock) {
  const int64_t ranks = engine.ranks();
  if (ranks == 1) return;
  const auto current = std::make_shared<std::weak_ptr<RankProcesses>>();
  engine.start_ranks = [current, ranks, options] {
    auto processes = std::make_shared<RankProcesses>(options, ranks);
    *current = processes;
    return start(processes, ranks, options);
  };
  const auto watch = [&](double first_s, const std::string& what, const std::string& of) {
    return std::make_shared<WorkWatch>(clock, StepDeadline(first_s), [=](const LateWork& late) {
      const auto processes = current->lock();
      if (processes == nullptr) return;
      processes->lose(
          absl::StrFormat("%s of %d %s has not ended within %.1f s: of the %d ranks that compute together one hangs",
                          what, late.size, of, late.limit_s, ranks));
    });
  };
  engine.watch_image = [images = watch(kFirstImageS, "an image", "patches")](int64_t patches) -> std::function<void()> {
    return [images, id = images->begin(patches)] { images->end(id); };
  };
  if (!options.watch_steps) return;
  const auto steps = watch(kFirstStepS, "a step", "tokens");
  const auto under_way = std::make_shared<WorkId>();
  engine.hooks.on_submit = [steps, under_way, told = engine.hooks.on_submit](int64_t tokens) {
    *under_way = steps->begin(tokens);
    if (told) told(tokens);
  };
  engine.hooks.on_step = [steps, under_way, told = engine.hooks.on_step](const EngineStep& step) {
    steps->end(*under_way);
    if (told) told(step);
  };
}

}  // namespace parvl
