#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <vector>

#include "parvl/elastic/router.h"

namespace parvl {
namespace {

InstanceLoad idle(int64_t id) {
  return {.id = InstanceId{id}, .open = true, .max_running = 8, .free_kv_tokens = 10'000};
}

struct Case {
  const char* name;
  std::vector<InstanceLoad> instances;
  std::optional<int64_t> chosen;
};

InstanceLoad with(InstanceLoad load, int64_t InstanceLoad::*field, int64_t value) {
  load.*field = value;
  return load;
}

TEST(Router, Generations) {
  using I = InstanceLoad;
  InstanceLoad closed = idle(1);
  closed.open = false;
  const Case cases[] = {
      {"none", {}, std::nullopt},
      {"none open", {closed}, std::nullopt},
      {"the open one", {closed, idle(2)}, 2},
      {"the lowest id among equals", {idle(3), idle(2)}, 2},
      {"less before it", {with(idle(1), &I::pending_tokens, 500), idle(2)}, 2},
      {"fewer beside it", {with(idle(1), &I::running, 3), with(idle(2), &I::running, 1)}, 2},
      {"its prefix is there", {idle(1), with(idle(2), &I::cached_tokens, 900)}, 2},
      {"a prefix is not worth a long line",
       {with(idle(1), &I::running, 1), with(with(idle(2), &I::cached_tokens, 900), &I::pending_tokens, 4000)},
       1},
      {"a line is better than to hold an answer up",
       {with(with(idle(1), &I::running, 1), &I::decoding, 1),
        with(with(idle(2), &I::running, 1), &I::pending_tokens, 1900)},
       2},
      {"but not a long one",
       {with(with(idle(1), &I::running, 1), &I::decoding, 1),
        with(with(idle(2), &I::running, 1), &I::pending_tokens, 2100)},
       1},
      {"a full one comes last", {with(idle(1), &I::running, 8), with(idle(2), &I::pending_tokens, 9000)}, 2},
      {"one without memory comes last",
       {with(idle(1), &I::free_kv_tokens, 100), with(idle(2), &I::pending_tokens, 9000)},
       2},
      {"what is cached needs no memory",
       {with(with(idle(1), &I::free_kv_tokens, 700), &I::cached_tokens, 900), idle(2)},
       1},
      {"images are encoded before it", {with(idle(1), &I::pending_patches, 100'000), idle(2)}, 2},
  };
  for (const Case& c : cases) {
    const auto chosen = route_generation(c.instances, {.prompt_tokens = 1000, .kv_tokens = 1500});
    EXPECT_EQ(chosen.has_value() ? std::optional(chosen->value) : std::nullopt, c.chosen) << c.name;
  }
}

TEST(Router, AnswersThatGoOn) {
  using I = InstanceLoad;
  const Case cases[] = {
      {"none", {}, std::nullopt},
      {"fewer beside it", {with(idle(1), &I::running, 2), with(idle(2), &I::running, 1)}, 2},
      {"more free memory", {with(idle(1), &I::free_kv_tokens, 5000), idle(2)}, 2},
      {"fewer beside it before more memory",
       {with(idle(1), &I::running, 1), with(idle(2), &I::free_kv_tokens, 5000)},
       2},
      {"a full one comes last", {with(idle(1), &I::running, 8), with(idle(2), &I::running, 7)}, 2},
      {"one without memory comes last", {with(idle(1), &I::free_kv_tokens, 1000), with(idle(2), &I::running, 7)}, 2},
  };
  for (const Case& c : cases) {
    const auto chosen = route_decoding(c.instances, {.prompt_tokens = 1000, .kv_tokens = 1500});
    EXPECT_EQ(chosen.has_value() ? std::optional(chosen->value) : std::nullopt, c.chosen) << c.name;
  }
}

TEST(Router, Encodings) {
  using I = InstanceLoad;
  InstanceLoad has = with(idle(2), &I::pending_patches, 100'000);
  has.has_output = true;
  const Case cases[] = {
      {"none", {}, std::nullopt},
      {"the lowest id among equals", {idle(2), idle(1)}, 1},
      {"less before it", {with(idle(1), &I::pending_patches, 64), idle(2)}, 2},
      {"its output is there", {idle(1), has}, 2},
      {"an instance that generates has less to give",
       {with(idle(1), &I::running, 4), with(idle(2), &I::pending_patches, 64)},
       2},
  };
  for (const Case& c : cases) {
    const auto chosen = route_encoding(c.instances, 256);
    EXPECT_EQ(chosen.has_value() ? std::optional(chosen->value) : std::nullopt, c.chosen) << c.name;
  }
}

// The order in which instances are listed is nobody's business, and more load never attracts.
RC_GTEST_PROP(RouterProperty, ChoosesByLoadAlone, ()) {
  std::vector<InstanceLoad> loads;
  const int count = *rc::gen::inRange(1, 8);
  for (int i = 0; i < count; ++i) {
    InstanceLoad load = idle(i);
    load.open = *rc::gen::arbitrary<bool>();
    load.running = *rc::gen::inRange(0, 10);
    load.decoding = *rc::gen::inRange<int64_t>(0, load.running + 1);
    load.pending_tokens = *rc::gen::inRange(0, 5000);
    load.free_kv_tokens = *rc::gen::inRange(0, 4000);
    load.cached_tokens = *rc::gen::inRange(0, 1200);
    loads.push_back(load);
  }
  const GenerationNeeds needs{.prompt_tokens = 1000, .kv_tokens = 1500};
  const auto chosen = route_generation(loads, needs);
  RC_ASSERT(chosen.has_value() ==
            std::any_of(loads.begin(), loads.end(), [](const InstanceLoad& load) { return load.open; }));
  std::vector<InstanceLoad> reversed(loads.rbegin(), loads.rend());
  RC_ASSERT(route_generation(reversed, needs) == chosen);
  if (!chosen.has_value()) return;
  auto& other = loads[static_cast<size_t>(*rc::gen::inRange(0, count))];
  if (other.id == *chosen) return;
  other.pending_tokens += 1000;
  other.running += 1;
  RC_ASSERT(route_generation(loads, needs) == chosen);
}

}  // namespace
}  // namespace parvl
