// What a fleet remembers of an instance and of a request. Only its own sources include it.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "parvl/elastic/fleet.h"

namespace parvl {

struct Fleet::Instance {
  Instance(InstanceId name, size_t in_pool, const FleetSettings& settings)
      : id(name), pool(in_pool), life(settings.instance), prefixes(settings.index_limit), images(settings.index_limit) {
    begin_cold(settings);
  }

  static constexpr double kNever = std::numeric_limits<double>::infinity();

  const InstanceId id;
  const size_t pool;
  InstanceLifecycle life;
  std::vector<StepDeadline> steps;  // by lane
  PrefixIndex prefixes, images;
  bool open = false;
  bool must_move = false;  // its time to finish is over: what is left there goes as soon as somebody can take it
  InstanceRoom room;
  int64_t free_kv_tokens = 0;  // as it said last
  int64_t generations = 0, encodings = 0, held = 0;
  int64_t pending_tokens = 0, pending_patches = 0;  // sent there, and not computed yet
  int64_t pending_prompts = 0;                      // of which the tokens are
  AddedEncoder added = AddedEncoder::kNone;
  int64_t adds = 0;                // orders to take it on so far: the last one's number
  double added_until_s = kNever;   // kAdding: by when it must be done
  double unused_since_s = kNever;  // kEncodes: while it is not needed
  double not_before_s = -kNever;   // kNone: it is not asked for again
  bool busy() const { return generations + encodings + held > 0; }

  // What is known of a process is not true of the next one.
  void begin_cold(const FleetSettings& settings) {
    prefixes.clear();
    images.clear();
    steps.clear();
    for (size_t lane = 0; lane < kStepLanes; ++lane) steps.emplace_back(settings.first_step_s, settings.step);
    room = {};
    added = AddedEncoder::kNone;
    must_move = false;
    not_before_s = -kNever;
  }
};

// Where the parts of a request are, as its actions said.
struct Fleet::Request {
  Request(FleetRequest of, size_t items)
      : life(of.shape), what(std::move(of)), encoding(items), holding(items), failed_encoding(items) {}

  RequestLifecycle life;
  FleetRequest what;
  Instance* generating = nullptr;
  Instance* kv_on = nullptr;   // where the keys and values of what is delivered lie
  int64_t pending_tokens = 0;  // of the prompt, until the first token of this attempt
  std::vector<Instance*> encoding, holding;
  // Who could not do it the last time: nobody's choice while there is another.
  std::vector<const Instance*> failed_encoding;
  const Instance* failed_generating = nullptr;

  bool uses(const Instance& instance) const {
    const auto is_it = [&](const Instance* one) { return one == &instance; };
    return is_it(generating) || is_it(kv_on) || std::any_of(encoding.begin(), encoding.end(), is_it) ||
           std::any_of(holding.begin(), holding.end(), is_it);
  }
  void computed_prompt() {
    if (generating != nullptr && pending_tokens > 0) {
      generating->pending_tokens -= pending_tokens;
      --generating->pending_prompts;
    }
    pending_tokens = 0;
  }
  void leave_generation() {
    computed_prompt();
    if (generating != nullptr) --generating->generations;
    generating = nullptr;
  }
  void leave_kv() {
    if (Instance* const was = std::exchange(kv_on, nullptr); was != nullptr) --was->held;
  }
  // What was begun there has come as far as it was to.
  void keep_kv() {
    kv_on = generating;
    ++kv_on->held;
    leave_generation();
  }
  void leave_encoding(size_t item) {
    Instance* const was = std::exchange(encoding[item], nullptr);
    if (was == nullptr) return;
    --was->encodings;
    was->pending_patches -= what.patches[item];
  }
  void leave_output(size_t item) {
    if (Instance* const was = std::exchange(holding[item], nullptr); was != nullptr) --was->held;
  }
  void leave_all() {
    leave_generation();
    leave_kv();
    for (size_t i = 0; i < encoding.size(); ++i) {
      leave_encoding(i);
      leave_output(i);
    }
  }
};

}  // namespace parvl
