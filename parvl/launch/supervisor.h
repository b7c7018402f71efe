// Starts the ranks of a run on this machine, watches them, and ends or restarts all of them when one dies.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "parvl/base/status.h"

namespace parvl {

struct LaunchOptions {
  std::vector<std::string> command;             // program and arguments; looked up in PATH
  int64_t processes = 1;                        // on this machine
  int64_t nodes = 1, node = 0;                  // machines of the run, and which this is
  std::string master_host = "127.0.0.1";        // of rank 0
  int64_t master_port = 0;                      // 0, with one machine: a free one
  int64_t max_restarts = 0;                     // of all ranks together, after one of them died
  double grace_s = 60;                          // from SIGTERM to SIGKILL; at most 10 after a rank has failed
  int stop_descriptor = -1;                     // readable when the run is to end; -1: never
  std::function<void(const std::string&)> log;  // a line an event; may be empty
};

// What torchrun gives its processes: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
// MASTER_PORT, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS. Pure.
std::vector<std::pair<std::string, std::string>> rank_environment(const LaunchOptions& options, int64_t local_rank,
                                                                  int64_t port, int64_t attempt);

// Returns when all ranks have ended: OK when each ended with 0, or, when the run was asked to end, by SIGTERM. A rank
// that ends otherwise ends the others (SIGTERM, then SIGKILL); then all start again, at most max_restarts times, unless
// its exit code is 2: a configuration stays wrong. InvalidArgument after exit code 2, Internal after others, naming the
// rank. The ranks die with this process. Main thread only.
absl::Status supervise(const LaunchOptions& options);

}  // namespace parvl
