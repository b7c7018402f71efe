// Processes that this one starts, watches and ends. They die with it, whatever it dies of.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parvl/base/status.h"

namespace parvl {

struct ChildCommand {
  std::vector<std::string> arguments;  // program first; looked up in PATH
  // Set over the environment of this process.
  std::vector<std::pair<std::string, std::string>> environment = {};
};

// Any thread may call; one of its own starts the processes and hears of their ends, since the kernel ends a child when
// the *thread* that started it has ended.
class Children {
 public:
  using Key = int64_t;
  // On the own thread: once for each start, when the process has ended or could not be started.
  using OnExit = std::function<void(Key, const std::string& how)>;

  explicit Children(OnExit on_exit);
  // Kills what still runs and waits for its end, a few seconds at most, without telling.
  ~Children();

  // Returns at once. `key` must not have been used before.
  void start(Key key, ChildCommand command);
  // SIGKILL, also for what it has started; of one that has ended: no effect.
  void kill(Key key);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// "was ended by SIGKILL", "ended with exit code 1"; of a status that waitpid gave.
std::string how_it_ended(int status);

}  // namespace parvl
