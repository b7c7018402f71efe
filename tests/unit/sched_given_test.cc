// Sequences whose keys and values were computed elsewhere.
#include <gtest/gtest.h>

#include "tests/unit/sched_fixture.h"

namespace parvl {
namespace {

SchedRequest make_given(int64_t id, int64_t tokens, int64_t given, std::vector<MediaItem> media = {},
                        TokenId first = 0) {
  SchedRequest out = make_request(id, tokens, std::move(media), 0, first);
  out.given = given;
  return out;
}

TEST(Given, IsFetchedBesideTheStepsAndOnlyTheRestIsComputed) {
  Scheduler scheduler(small_config());
  ASSERT_TRUE(scheduler.add(make_request(1, 5), 0).ok());
  ASSERT_TRUE(scheduler.add(make_given(2, 31, 30, {image(1, 2, 20)}, 100), 0).ok());
  const SchedulerOutput first = scheduler.schedule(0);
  ASSERT_EQ(first.sequences.size(), 1u);
  EXPECT_TRUE(first.encodes.empty());  // its image is in what is given
  ASSERT_EQ(first.kv_fetches.size(), 1u);
  EXPECT_EQ(first.kv_fetches[0].id.value, 2);
  EXPECT_EQ(first.kv_fetches[0].begin, 0);
  EXPECT_EQ(first.kv_fetches[0].count, 30);  // more than a step's budget
  EXPECT_EQ(first.kv_fetches[0].blocks.size(), 8u);
  EXPECT_EQ(scheduler.stats().pending_tokens, 5 + 1);
  commit_sevens(scheduler, first);
  const SchedulerOutput second = scheduler.schedule(1);
  EXPECT_TRUE(second.kv_fetches.empty());
  ASSERT_EQ(second.sequences.size(), 1u);
  EXPECT_EQ(second.sequences[0].id.value, 1);
  commit_sevens(scheduler, second);
  scheduler.commit_kv(RequestId{2}, true);
  const SchedulerOutput third = scheduler.schedule(2);
  ASSERT_EQ(third.sequences.size(), 2u);
  EXPECT_EQ(third.sequences[1].begin, 30);
  EXPECT_EQ(third.sequences[1].count, 1);
  EXPECT_TRUE(third.sequences[1].samples);
  EXPECT_TRUE(third.sequences[1].media.empty());
  EXPECT_EQ(scheduler.stats().kv_fetched, 1);
  EXPECT_EQ(scheduler.stats().kv_fetched_tokens, 30);
}

TEST(Given, WhatDoesNotComeIsComputed) {
  Scheduler scheduler(small_config());
  ASSERT_TRUE(scheduler.add(make_given(1, 12, 11, {image(1, 5, 4)}), 0).ok());
  ASSERT_EQ(scheduler.schedule(0).kv_fetches.size(), 1u);
  scheduler.commit_kv(RequestId{1}, false);
  const SchedulerOutput output = scheduler.schedule(1);
  EXPECT_TRUE(output.kv_fetches.empty());
  EXPECT_EQ(output.encodes.size(), 1u);
  ASSERT_EQ(output.sequences.size(), 1u);
  EXPECT_EQ(output.sequences[0].begin, 0);
  EXPECT_EQ(output.sequences[0].count, 5);
  EXPECT_EQ(scheduler.stats().kv_fetch_failures, 1);
  EXPECT_EQ(scheduler.stats().kv_fetched, 0);
}

TEST(Given, OnlyWhatThePrefixCacheLacksIsFetchedAndWhatCameIsFoundByOthers) {
  Scheduler scheduler(small_config());
  ASSERT_TRUE(scheduler.add(make_given(1, 10, 9), 0).ok());
  ASSERT_EQ(scheduler.schedule(0).kv_fetches.size(), 1u);
  scheduler.commit_kv(RequestId{1}, true);
  ASSERT_TRUE(scheduler.add(make_given(2, 16, 15), 1).ok());
  ASSERT_TRUE(scheduler.add(make_given(3, 10, 8), 1).ok());  // all that is given is there
  const SchedulerOutput output = scheduler.schedule(1);
  ASSERT_EQ(output.kv_fetches.size(), 1u);
  EXPECT_EQ(output.kv_fetches[0].id.value, 2);
  EXPECT_EQ(output.kv_fetches[0].begin, 8);
  EXPECT_EQ(output.kv_fetches[0].count, 7);
  ASSERT_EQ(output.sequences.size(), 2u);
  EXPECT_EQ(output.sequences[1].id.value, 3);
  EXPECT_EQ(output.sequences[1].begin, 8);
}

TEST(Given, NobodyTakesTheBlocksMeanwhileAndTheEndWaits) {
  SchedulerConfig config = small_config();
  config.max_model_len = 32;
  config.num_blocks = 8;
  Scheduler scheduler(config);
  ASSERT_TRUE(scheduler.add(make_given(1, 24, 23), 0).ok());
  ASSERT_EQ(scheduler.schedule(0).kv_fetches.size(), 1u);
  SchedRequest urgent = make_request(2, 12, {}, /*priority=*/-1, 100);
  ASSERT_TRUE(scheduler.add(std::move(urgent), 1).ok());
  SchedulerOutput output = scheduler.schedule(1);  // 2 of 8 blocks are left
  EXPECT_TRUE(output.preempted.empty());
  EXPECT_TRUE(output.sequences.empty());
  scheduler.finish(RequestId{1});
  EXPECT_EQ(scheduler.stats().blocks_used, 6);  // they are being written
  EXPECT_TRUE(scheduler.fetches(RequestId{1}));
  scheduler.commit_kv(RequestId{1}, true);
  EXPECT_FALSE(scheduler.knows(RequestId{1}));
  EXPECT_EQ(scheduler.stats().blocks_used, 0);
  EXPECT_EQ(scheduler.schedule(2).sequences.size(), 1u);
}

TEST(Given, AfterAPreemptionAllIsComputedHere) {
  SchedulerConfig config = small_config();
  config.max_model_len = 32;
  config.num_blocks = 8;
  config.prefix_caching = false;
  Scheduler scheduler(config);
  ASSERT_TRUE(scheduler.add(make_request(1, 11), 0).ok());
  ASSERT_TRUE(scheduler.add(make_given(2, 19, 18, {}, 100), 0).ok());
  SchedulerOutput output = scheduler.schedule(0);
  ASSERT_EQ(output.kv_fetches.size(), 1u);  // now all blocks are held
  scheduler.commit_kv(RequestId{2}, true);
  while (output.preempted.empty()) {  // until the first one needs another block
    commit_sevens(scheduler, output);
    output = scheduler.schedule(1);
    ASSERT_LT(output.step.value, 10);
  }
  EXPECT_EQ(output.preempted, std::vector<RequestId>{RequestId{2}});
  commit_sevens(scheduler, output);
  scheduler.finish(RequestId{1});
  output = scheduler.schedule(2);
  EXPECT_TRUE(output.kv_fetches.empty());
  ASSERT_EQ(output.sequences.size(), 1u);
  EXPECT_EQ(output.sequences[0].id.value, 2);
  EXPECT_EQ(output.sequences[0].begin, 0);
  EXPECT_EQ(output.sequences[0].count, 16);
}

TEST(Given, TheLastTokenIsNeverGiven) {
  EXPECT_TRUE(validate(make_given(1, 5, 4)).ok());
  EXPECT_FALSE(validate(make_given(1, 5, 5)).ok());
  EXPECT_FALSE(validate(make_given(1, 5, -1)).ok());
}

}  // namespace
}  // namespace parvl
