// Requests that wait for memory.
#include <gtest/gtest.h>

#include "tests/unit/sched_fixture.h"

namespace parvl {
namespace {

// What waiting for memory costs: one request decodes and holds most blocks, the one behind it begins like an earlier
// one.
TEST(Scheduler, WaitingForMemoryDoesNotLookUpThePrefixAtEveryStep) {
  constexpr int64_t kSteps = 60;
  for (const int64_t blocks : {40, 400}) {
    SCOPED_TRACE(blocks);
    SchedulerConfig config = small_config();
    config.num_blocks = blocks;
    config.max_model_len = blocks * config.block_size;
    config.max_batched_tokens = blocks * config.block_size;
    Scheduler scheduler(config);
    const int64_t half = config.max_model_len / 2;
    ASSERT_TRUE(scheduler.add(make_request(1, half, {}, 0, 0), 0).ok());
    commit_sevens(scheduler, scheduler.schedule(0));
    // Its first half is what the running one holds; the other half does not fit beside that.
    SchedRequest waiting = make_request(2, config.max_model_len - 1, {}, 0, 0);
    for (size_t i = static_cast<size_t>(half / 2); i < waiting.prompt.size(); ++i) waiting.prompt[i] += 100'000;
    ASSERT_TRUE(scheduler.add(std::move(waiting), 0).ok());
    commit_sevens(scheduler, scheduler.schedule(0));
    const SchedulerStats before = scheduler.stats();
    EXPECT_EQ(before.waiting, 1);
    EXPECT_GE(before.block_lookups, half / 2 / config.block_size);
    for (int64_t step = 0; step < kSteps; ++step) commit_sevens(scheduler, scheduler.schedule(0));
    EXPECT_EQ(scheduler.stats().waiting, 1);
    EXPECT_LE(scheduler.stats().block_lookups - before.block_lookups, kSteps);  // one a step, however long the prompt
    // It starts as soon as there is room, from the same prefix.
    scheduler.finish(RequestId{1});
    const SchedulerOutput output = scheduler.schedule(0);
    ASSERT_EQ(output.sequences.size(), 1u);
    EXPECT_EQ(output.sequences[0].id.value, 2);
    EXPECT_EQ(output.sequences[0].begin, half / 2);
    commit_sevens(scheduler, output);
    scheduler.check_invariants();
  }
}

TEST(Scheduler, AWaitingRequestNoticesThatItsPrefixHasGrown) {
  SchedulerConfig config = small_config();
  config.max_batched_tokens = 100;
  Scheduler scheduler(config);
  // Two equal prompts. The memory does not hold the text before the image twice; once that is computed, it need not.
  ASSERT_TRUE(scheduler.add(make_request(1, 50, {image(1, 32, 4)}), 0).ok());
  ASSERT_TRUE(scheduler.add(make_request(2, 9, {}, 0, 500), 0).ok());
  ASSERT_TRUE(scheduler.add(make_request(3, 50, {image(1, 32, 4)}), 0).ok());
  const SchedulerOutput first = scheduler.schedule(0);
  ASSERT_EQ(first.sequences.size(), 2u);  // 8 and 3 of the 16 blocks
  EXPECT_EQ(scheduler.stats().waiting, 1);
  commit_sevens(scheduler, first);
  commit_sevens(scheduler, scheduler.schedule(0));
  EXPECT_EQ(scheduler.stats().waiting, 0);
  scheduler.check_invariants();
}

}  // namespace
}  // namespace parvl
