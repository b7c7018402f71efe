// Ranks as processes on the CPU, through libtorch's Gloo.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parvl/comm/communicator.h"

namespace parvl {

struct GlooOptions {
  int64_t rank = 0, world = 1;
  std::string host = "127.0.0.1";  // of the rank that holds the store
  int64_t port = 0;  // the store's; rank 0 listens there, on 0 where a port is free, unless it is somebody else's
  std::function<void(int64_t port)> on_listening;  // on rank 0, before it waits for the others; may be empty
  bool serve_store = true;                         // whether rank 0 holds it: false when the launcher does
  std::string address;      // by which the others reach this rank; "": the loopback address when `host` is one,
                            // else that of this machine's name
  std::string prefix;       // of this run's names in the store: another attempt takes another one
  double deadline_s = 600;  // for all ranks to come
  // For each call, by Gloo itself. Longer than the work of one rank for which others wait; checked groups
  // (parvl/comm/checked_group.h) look after those that hang.
  double call_deadline_s = 7 * 24 * 3600.0;
};

// Waits for the store and for all ranks. Internal, naming host and port.
absl::StatusOr<std::unique_ptr<Communicator>> make_gloo_communicator(const GlooOptions& options);

}  // namespace parvl
