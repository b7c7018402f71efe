// What starts and ends the processes of instances: a local supervisor, or whatever places them on other machines.
#pragma once

#include <functional>
#include <string>

#include "parvl/elastic/instance_id.h"

namespace parvl {

struct InstanceLaunch {
  InstanceId instance = {};
  int64_t epoch = 0;
  std::string pool;
  std::string gateway;  // HOST:PORT to attach to
  std::string token;    // the run's: a secret
};

class InstanceStarter {
 public:
  using OnExit = std::function<void(InstanceId, int64_t epoch, const std::string& how)>;
  // Kills whatever still runs.
  virtual ~InstanceStarter() = default;
  // Once, before the first start. Called on any thread when a process has ended or could not be started; `how` is half
  // a sentence.
  virtual void set_on_exit(OnExit on_exit) = 0;
  // Both return at once.
  virtual void start(const InstanceLaunch& launch) = 0;
  virtual void kill(InstanceId instance, int64_t epoch) = 0;  // of one that has ended: no effect
};

}  // namespace parvl
