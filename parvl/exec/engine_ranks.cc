#include "parvl/exec/engine_ranks.h"

#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <utility>

namespace parvl {

EngineRanks::~EngineRanks() {
  {
    std::lock_guard lock(mutex_);
    if (health_.ok()) health_ = absl::UnavailableError("the engine ends");  // as its ranks do now, which is no loss
  }
  parts_.steps->close();
  parts_.processes.reset();
}

std::vector<int64_t> EngineRanks::pids() const {
  std::vector<int64_t> out = parts_.steps->processes();
  out.insert(out.begin(), ::getpid());
  return out;
}

void EngineRanks::set_groups(std::shared_ptr<BackboneRanks> groups) {
  std::lock_guard lock(mutex_);
  groups_ = std::move(groups);
}

void EngineRanks::send(std::string_view message) {
  absl::Status status = health();
  if (status.ok()) status = parts_.steps->write(message);
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
}

void EngineRanks::lose(const absl::Status& why) {
  bool loading = false;
  {
    std::lock_guard lock(mutex_);
    if (!health_.ok()) return;
    health_ = absl::UnavailableError(why.message());
    loading = groups_ == nullptr;
    if (groups_ != nullptr) groups_->abort(std::string(why.message()));
    if (groups_ != nullptr && encoders_ != nullptr) encoders_->close();
  }
  lost_.notify_all();
  parts_.steps->close();
  if (parts_.on_lost) parts_.on_lost(health(), loading);
}

absl::Status EngineRanks::lose_for(const absl::Status& status) {
  constexpr std::chrono::seconds kUntilItIsHeardOf{1};
  {
    std::unique_lock lock(mutex_);
    lost_.wait_for(lock, kUntilItIsHeardOf, [this] { return !health_.ok(); });
  }
  lose(status);
  return health();
}

absl::Status EngineRanks::health() const {
  std::lock_guard lock(mutex_);
  return health_;
}

}  // namespace parvl
