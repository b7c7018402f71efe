#include "apps/rank_processes.h"

#include <absl/strings/str_cat.h>

#include <mutex>
#include <utility>

#include "parvl/comm/gloo/gloo_communicator.h"
#include "parvl/launch/children.h"

namespace parvl {
namespace {

class RankProcesses {
 public:
  explicit RankProcesses(const RankProcessOptions& options)
      : options_(options), children_([this](Children::Key rank, const std::string& how) { ended(rank, how); }) {}

  void start(const std::string& ring, int64_t port) {
    for (int64_t rank = 1; rank < options_.ranks; ++rank) {
      ChildCommand command;
      command.arguments = {
          options_.program, "rank", "--rank", absl::StrCat(rank), "--ranks", absl::StrCat(options_.ranks),
          "--ring",         ring,   "--port", absl::StrCat(port)};
      command.environment = {{"OMP_NUM_THREADS", "1"}};  // on the CPU all ranks wait for the slowest
      children_.start(rank, std::move(command));
    }
  }

  // From here on it hears of ends.
  void set_engine(EngineRanks* engine) {
    std::lock_guard lock(mutex_);
    engine_ = engine;
  }

 private:
  void ended(int64_t rank, const std::string& how) {
    const absl::Status why =
        absl::UnavailableError(absl::StrCat("rank ", rank, " of the ", options_.ranks, " that compute together ", how));
    std::lock_guard lock(mutex_);
    if (engine_ == nullptr) return options_.on_lost(why, /*loading=*/true);
    engine_->lose(why);
  }

  const RankProcessOptions options_;
  std::mutex mutex_;
  EngineRanks* engine_ = nullptr;
  Children children_;  // last: it tells while it lives
};

}  // namespace

std::function<absl::StatusOr<std::unique_ptr<EngineRanks>>()> rank_processes(const RankProcessOptions& options) {
  return [options]() -> absl::StatusOr<std::unique_ptr<EngineRanks>> {
    EngineRanks::Parts parts;
    PARVL_ASSIGN_OR_RETURN(parts.steps, RingWriter::create(options.ranks - 1));
    const auto processes = std::make_shared<RankProcesses>(options);
    parts.processes = processes;
    GlooOptions gloo;
    gloo.world = options.ranks;
    gloo.on_listening = [&](int64_t port) { processes->start(parts.steps->path(), port); };
    PARVL_ASSIGN_OR_RETURN(parts.communicator, make_gloo_communicator(gloo));
    parts.on_lost = options.on_lost;
    auto out = std::make_unique<EngineRanks>(std::move(parts));
    processes->set_engine(out.get());
    return out;
  };
}

}  // namespace parvl
