// Which instance gets the next piece of work. Pure functions of a snapshot: equal snapshots, equal choices.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "parvl/elastic/instance_id.h"

namespace parvl {

// One instance as the gateway sees it now.
struct InstanceLoad {
  InstanceId id = {};
  bool open = false;           // requests may go there
  int64_t pending_tokens = 0;  // of prompts that were sent there and are not computed yet
  int64_t running = 0;         // generations
  int64_t decoding = 0;        // those of them whose prompt is computed
  int64_t max_running = 1;
  int64_t free_kv_tokens = 0;   // whose keys and values would find room, those of evictable prefixes included
  int64_t pending_patches = 0;  // of images that were sent there and are not encoded yet
  // Of the work to be placed:
  int64_t cached_tokens = 0;  // of its prompt, whose keys and values are there
  bool has_output = false;    // the image's encoder output is there
};

struct RouterCosts {
  // Seconds; only their ratios matter. A generation's share of a step slows those beside it.
  double token_s = 1e-4, patch_s = 2e-5, running_s = 2e-2;
  // How much a pause in an answer that somebody reads weighs against the same wait before one begins.
  double pause = 2;
};

struct GenerationNeeds {
  int64_t prompt_tokens = 0;
  int64_t kv_tokens = 0;  // prompt and the most that may be generated
};

// The open instance where all together wait least: this request for what is before it, for what of its own prompt is
// not cached and for the generations beside it; and those that decode there, for that prompt. One that is full or lacks
// KV memory comes after all that are not. The lowest id among equals; nullopt when none is open.
std::optional<InstanceId> route_generation(std::span<const InstanceLoad> instances, const GenerationNeeds& needs,
                                           const RouterCosts& costs = {});

// Likewise the one where an answer that was begun elsewhere goes on: with the fewest beside it, then with the most free
// KV memory.
std::optional<InstanceId> route_decoding(std::span<const InstanceLoad> instances, const GenerationNeeds& needs);

// Likewise for an image of so many patches: one that has its output already, else the one with the least before it.
std::optional<InstanceId> route_encoding(std::span<const InstanceLoad> instances, int64_t patches,
                                         const RouterCosts& costs = {});

}  // namespace parvl
