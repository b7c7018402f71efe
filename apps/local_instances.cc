#include "apps/local_instances.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "parvl/launch/children.h"

namespace parvl {
namespace {

// An epoch of an instance never comes again, so the two name a process.
constexpr int kEpochBits = 32;

// The process before has gone, and with it the memory of its device, before the next one of an instance starts.
class LocalInstances : public InstanceStarter {
 public:
  LocalInstances(const std::string& program, GpuPlacement gpus, std::vector<std::shared_ptr<SharedBlock>> weights)
      : program_(program),
        gpus_(std::move(gpus)),
        weights_(std::move(weights)),
        children_([this](Children::Key key, const std::string& how) { ended(key, how); }) {}

  void set_on_exit(OnExit on_exit) override { on_exit_ = std::move(on_exit); }

  void start(const InstanceLaunch& launch) override {
    ChildCommand command;
    command.arguments = {program_,     "worker",
                         "--gateway",  launch.gateway,
                         "--instance", absl::StrCat(launch.instance.value),
                         "--epoch",    absl::StrCat(launch.epoch)};
    // Not an argument: those are for everybody on the machine to read.
    command.environment = {{"PARVL_RUN_TOKEN", launch.token}};
    std::lock_guard lock(mutex_);
    const auto [found, is_new] = instances_.try_emplace(launch.instance.value);
    Instance& instance = found->second;
    if (is_new) instance.environment = environment_of_next(launch.pool);
    command.environment.push_back(instance.environment);
    instance.next.emplace(key_of(launch.instance, launch.epoch), std::move(command));
    if (!instance.runs) start_next(instance);
  }

  void kill(InstanceId instance, int64_t epoch) override { children_.kill(key_of(instance, epoch)); }

 private:
  static Children::Key key_of(InstanceId instance, int64_t epoch) { return instance.value << kEpochBits | epoch; }

  struct Instance {
    std::pair<std::string, std::string> environment;  // of its devices
    bool runs = false;
    std::optional<std::pair<Children::Key, ChildCommand>> next;  // waits for the one that runs
  };

  // With the mutex, as the next one.
  std::pair<std::string, std::string> environment_of_next(const std::string& pool) {
    const auto gpus = gpus_.find(pool);
    if (gpus == gpus_.end()) return {"OMP_NUM_THREADS", "1"};
    return {"CUDA_VISIBLE_DEVICES", absl::StrJoin(gpus->second.at(placed_[pool]++), ",")};
  }

  void start_next(Instance& instance) {
    auto [key, command] = *std::exchange(instance.next, std::nullopt);
    instance.runs = true;
    children_.start(key, std::move(command));
  }

  void ended(Children::Key key, const std::string& how) {
    on_exit_(InstanceId{key >> kEpochBits}, key & ((int64_t{1} << kEpochBits) - 1), "its process " + how);
    std::lock_guard lock(mutex_);
    Instance& instance = instances_[key >> kEpochBits];
    instance.runs = false;
    if (instance.next.has_value()) start_next(instance);
  }

  const std::string program_;
  const GpuPlacement gpus_;
  const std::vector<std::shared_ptr<SharedBlock>> weights_;
  OnExit on_exit_;
  std::mutex mutex_;
  std::map<int64_t, Instance> instances_;
  std::map<std::string, size_t> placed_;  // instances of each pool that have their GPUs
  Children children_;                     // last: it tells while it lives
};

}  // namespace

std::unique_ptr<InstanceStarter> make_local_instances(const std::string& program, GpuPlacement gpus,
                                                      std::vector<std::shared_ptr<SharedBlock>> weights) {
  return std::make_unique<LocalInstances>(program, std::move(gpus), std::move(weights));
}

}  // namespace parvl
