// What a fleet engine remembers. Only its own sources include it.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parvl/serve/pools/fleet_engine.h"
#include "parvl/serve/pools/stream_server.h"

namespace parvl {

// A request, and what of its answer was given out.
struct FleetEngine::Live {
  EngineRequest request;
  GenerateResult result;
  double arrival_s = 0, first_token_s = 0;
  bool has_end = false;  // an attempt has told of its counts

  // An image that is encoded by itself.
  struct Item {
    int attempt = 0;     // that is under way; 0: none
    std::string output;  // where its encoder output lies; "": nowhere
  };
  std::vector<Item> items;
  std::vector<InstanceId> encoded_on, generated_on;  // each once, in order
  int generation = 0;                                // the attempt that is under way; 0: none
  std::string kv;  // where the keys and values up to the last token lie, that not included; "": nowhere
};

// What is known of an instance's process.
struct FleetEngine::Link {
  std::optional<StreamId> stream;
  bool released = false;  // it ends as it was asked to, its stream before its process
  int64_t epoch = 0;
  std::vector<int64_t> pids;  // of its ranks; the first one speaks
  std::string device;
  EngineStats counts;
  absl::Status refusal;  // why it would not take on its modules, when it would not
};

// What was done since the start, without what is held now.
void add_counts(EngineStats& to, const EngineStats& more);

}  // namespace parvl
