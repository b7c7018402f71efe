#include "parvl/comm/local/local_store.h"

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

namespace parvl {

struct LocalStoreState {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::string> values;
};

namespace {

class LocalStore : public Store {
 public:
  explicit LocalStore(std::shared_ptr<LocalStoreState> state) : state_(std::move(state)) {}

  absl::Status set(const std::string& key, const std::string& value) override {
    std::lock_guard lock(state_->mutex);
    state_->values[key] = value;
    state_->changed.notify_all();
    return absl::OkStatus();
  }
  absl::StatusOr<std::optional<std::string>> look(const std::string& key) override {
    std::lock_guard lock(state_->mutex);
    const auto found = state_->values.find(key);
    return found == state_->values.end() ? std::nullopt : std::optional(found->second);
  }
  absl::StatusOr<std::string> get(const std::string& key, double timeout_s) override {
    std::unique_lock lock(state_->mutex);
    const auto there = [&] { return state_->values.count(key) > 0; };
    if (!state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), there)) {
      return absl::DeadlineExceededError(absl::StrCat(where(), ": nobody has set ", key, " within ", timeout_s, " s"));
    }
    return state_->values[key];
  }
  absl::Status erase(const std::string& key) override {
    std::lock_guard lock(state_->mutex);
    state_->values.erase(key);
    return absl::OkStatus();
  }
  std::string where() const override { return "the store of this process"; }
  bool ends_with_this_process() const override { return false; }

 private:
  std::shared_ptr<LocalStoreState> state_;
};

}  // namespace

std::shared_ptr<LocalStoreState> make_local_store_state() { return std::make_shared<LocalStoreState>(); }

std::unique_ptr<Store> make_local_store(std::shared_ptr<LocalStoreState> state) {
  return std::make_unique<LocalStore>(std::move(state));
}

}  // namespace parvl
