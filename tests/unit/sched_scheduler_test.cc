// The scheduler's rules one by one; random loads are in sched_property_test.
#include <absl/strings/match.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "parvl/sched/record.h"
#include "tests/unit/sched_fixture.h"

namespace parvl {
namespace {

TEST(Scheduler, CutsALongPromptAndLetsRunningSequencesGoFirst) {
  Scheduler scheduler(small_config());
  ASSERT_TRUE(scheduler.add(make_request(1, 3), 0).ok());
  commit_sevens(scheduler, scheduler.schedule(0));
  ASSERT_TRUE(scheduler.add(make_request(2, 40, {}, 0, 100), 1).ok());
  const SchedulerOutput output = scheduler.schedule(1);
  ASSERT_EQ(output.sequences.size(), 2u);
  EXPECT_EQ(output.sequences[0].id.value, 1);
  EXPECT_EQ(output.sequences[0].count, 1);
  EXPECT_EQ(output.sequences[1].count, 15);  // what the budget of 16 leaves
  EXPECT_FALSE(output.sequences[1].samples);
  commit_sevens(scheduler, output);
  const SchedulerOutput next = scheduler.schedule(2);
  EXPECT_EQ(next.sequences[1].begin, 15);
}

TEST(Scheduler, AShortPromptNeedNotWaitForTheWholeOfALongOne) {
  SchedulerConfig config = small_config();
  config.max_batched_tokens = 64;
  config.num_blocks = 80;
  config.max_model_len = 256;
  const auto first_step = [&config](std::vector<SchedRequest> requests) {
    Scheduler scheduler(config);
    for (SchedRequest& request : requests) EXPECT_TRUE(scheduler.add(std::move(request), 0).ok());
    std::vector<std::pair<int64_t, bool>> out;
    for (const SequenceWork& work : scheduler.schedule(1).sequences) out.emplace_back(work.count, work.samples);
    scheduler.check_invariants();
    return out;
  };
  using Works = std::vector<std::pair<int64_t, bool>>;
  EXPECT_EQ(first_step({make_request(1, 200)}), (Works{{64, false}}));
  // Half for it, and what the other leaves of its own half.
  EXPECT_EQ(first_step({make_request(1, 200), make_request(2, 20, {}, 0, 300)}), (Works{{44, false}, {20, true}}));
  EXPECT_EQ(first_step({make_request(1, 200), make_request(2, 99, {}, 0, 300)}), (Works{{32, false}, {32, false}}));
  EXPECT_EQ(first_step({make_request(1, 90), make_request(2, 90, {}, 0, 300), make_request(3, 9, {}, 0, 600)}),
            (Works{{39, false}, {16, false}, {9, true}}));
  // Of a lower priority: nothing while a higher one wants it.
  EXPECT_EQ(first_step({make_request(1, 200), make_request(2, 20, {}, 1, 300)}), (Works{{64, false}}));
  EXPECT_EQ(first_step({make_request(1, 60), make_request(2, 20, {}, 1, 300)}), (Works{{60, true}, {4, false}}));
  // It cannot begin: nothing is kept for it.
  config.max_seqs = 1;
  EXPECT_EQ(first_step({make_request(1, 200), make_request(2, 20, {}, 0, 300)}), (Works{{64, false}}));
}

// A step takes 10 ms and 1 ms a token; it aims at 30 ms, so that 19 tokens of a prompt fit beside one answer.
TEST(Scheduler, AStepThatAnswersWaitForTakesItsTime) {
  SchedulerConfig config = small_config();
  config.max_batched_tokens = 64;
  config.num_blocks = 200;
  config.max_model_len = 512;
  config.step_s = 0.030 / StepPace::kAim;
  Scheduler scheduler(config);
  const auto step = [&scheduler] {
    const SchedulerOutput output = scheduler.schedule(0);
    StepTokens tokens{output.step, {}, 0.010};
    std::vector<int64_t> counts;
    for (const SequenceWork& work : output.sequences) {
      if (work.samples) tokens.tokens.push_back(7);
      counts.push_back(work.count);
      tokens.seconds += 0.001 * static_cast<double>(work.count);
    }
    scheduler.commit(tokens);
    scheduler.check_invariants();
    return counts;
  };
  using Counts = std::vector<int64_t>;
  ASSERT_TRUE(scheduler.add(make_request(1, 64), 0).ok());
  EXPECT_EQ(step(), (Counts{64}));  // nobody waits for it
  EXPECT_EQ(step(), (Counts{1}));
  ASSERT_TRUE(scheduler.add(make_request(2, 400, {}, 0, 100), 0).ok());
  EXPECT_EQ(step(), (Counts{1, 16}));
  for (int i = 0; i < 8; ++i) step();
  EXPECT_THAT(step(), testing::ElementsAre(1, testing::AllOf(testing::Ge(17), testing::Le(19))));
  // A short prompt has its part of that.
  ASSERT_TRUE(scheduler.add(make_request(3, 9, {}, 0, 600), 0).ok());
  EXPECT_THAT(step(), testing::ElementsAre(1, testing::Ge(8), testing::Ge(8)));
  scheduler.finish(RequestId{1});
  scheduler.finish(RequestId{3});
  EXPECT_EQ(step(), (Counts{64}));
}

TEST(Scheduler, ComputesTheTextBeforeAnImageWhileItIsEncoded) {
  Scheduler scheduler(small_config());
  ASSERT_TRUE(scheduler.add(make_request(1, 12, {image(1, 5, 4)}), 0).ok());
  SchedulerOutput output = scheduler.schedule(0);
  ASSERT_EQ(output.encodes.size(), 1u);
  ASSERT_EQ(output.sequences.size(), 1u);
  EXPECT_EQ(output.sequences[0].count, 5);
  EXPECT_FALSE(output.sequences[0].samples);
  commit_sevens(scheduler, output);
  EXPECT_TRUE(scheduler.schedule(1).sequences.empty());  // nothing to do until the image is there
  scheduler.commit_encode(output.encodes[0].slot, true);
  const SchedulerOutput rest = scheduler.schedule(2);
  ASSERT_EQ(rest.sequences.size(), 1u);
  EXPECT_EQ(rest.sequences[0].begin, 5);
  EXPECT_EQ(rest.sequences[0].count, 7);
  EXPECT_TRUE(rest.sequences[0].samples);
  ASSERT_EQ(rest.sequences[0].media.size(), 1u);
  EXPECT_EQ(rest.sequences[0].media[0].slot, output.encodes[0].slot);
}

TEST(Scheduler, AChunkMayEndInsideAnImage) {
  Scheduler scheduler(small_config());
  ASSERT_TRUE(scheduler.add(make_request(1, 30, {image(1, 2, 25)}), 0).ok());
  const SlotId slot = scheduler.schedule(0).encodes.at(0).slot;
  scheduler.commit({StepId{1}, {}});
  scheduler.commit_encode(slot, true);
  const SchedulerOutput first = scheduler.schedule(1);
  EXPECT_EQ(first.sequences[0].begin, 2);
  EXPECT_EQ(first.sequences[0].count, 16);
  commit_sevens(scheduler, first);
  const SchedulerOutput second = scheduler.schedule(2);
  EXPECT_EQ(second.sequences[0].count, 12);
  EXPECT_EQ(second.sequences[0].media.size(), 1u);
}

TEST(Scheduler, FindsPrefixesOfEqualContentOnly) {
  // 0: the same again; 1: another image; 2: another salt; 3: the same image, other text before it.
  for (int variant = 0; variant < 4; ++variant) {
    SCOPED_TRACE(variant);
    Scheduler scheduler(small_config());
    const auto run = [&](SchedRequest request) {
      const RequestId id = request.id;
      EXPECT_TRUE(scheduler.add(std::move(request), 0).ok());
      int64_t begin = -1;
      for (int i = 0; i < 4; ++i) {
        const SchedulerOutput output = scheduler.schedule(0);
        if (begin < 0 && !output.sequences.empty()) begin = output.sequences[0].begin;
        commit_sevens(scheduler, output);
        for (const EncodeWork& work : output.encodes) scheduler.commit_encode(work.slot, true);
      }
      scheduler.finish(id);
      return begin;
    };
    EXPECT_EQ(run(make_request(1, 15, {image(1, 4, 8)})), 0);
    SchedRequest second = make_request(2, 15, {image(variant == 1 ? 2 : 1, 4, 8)});
    if (variant == 2) second.cache_salt = "another tenant";
    if (variant == 3) second.prompt[0] = 99;
    EXPECT_EQ(run(std::move(second)), variant == 0 ? 12 : variant == 1 ? 4 : 0);
    scheduler.check_invariants();
  }
}

TEST(Scheduler, RefusesWhatCanNeverRun) {
  Scheduler scheduler(small_config());
  EXPECT_EQ(scheduler.add(make_request(1, 64), 0).message(),
            "the prompt has 64 tokens; the limit is 64 for prompt and answer together, so at most 63 may be prompt");
  const absl::Status status = scheduler.add(make_request(2, 20, {image(1, 0, 4), image(2, 6, 4, 301)}), 0);
  EXPECT_EQ(status.message(),
            "media item 2 needs 301 bytes of encoder output, more than the 300 of the encoder cache; send it smaller");
  EXPECT_TRUE(scheduler.idle());
}

TEST(Scheduler, PreemptsTheLastAndComputesItAgainFromItsTokens) {
  SchedulerConfig config = small_config();
  config.num_blocks = 16;
  config.prefix_caching = false;
  Scheduler scheduler(config);
  ASSERT_TRUE(scheduler.add(make_request(1, 30), 0).ok());
  ASSERT_TRUE(scheduler.add(make_request(2, 20), 1).ok());
  std::map<int64_t, int64_t> out;
  bool preempted = false;
  for (int step = 0; step < 200 && !scheduler.idle(); ++step) {
    const SchedulerOutput output = scheduler.schedule(2);
    for (const RequestId id : output.preempted) {
      preempted = true;
      EXPECT_EQ(id.value, 2);
    }
    StepTokens tokens{output.step, {}};
    for (const SequenceWork& work : output.sequences) {
      if (!work.samples) continue;
      tokens.tokens.push_back(7);
      ++out[work.id.value];
    }
    scheduler.commit(tokens);
    scheduler.check_invariants();
    for (const int64_t id : {1, 2}) {
      if (out[id] == 25) scheduler.finish(RequestId{id});
    }
  }
  EXPECT_TRUE(preempted);
  EXPECT_TRUE(scheduler.idle());
  EXPECT_EQ(out[1], 25);
  EXPECT_EQ(out[2], 25);  // none was sampled twice
}

TEST(Scheduler, APriorityGoesFirstButNobodyWaitsForEver) {
  SchedulerConfig config = small_config();
  config.max_seqs = 1;
  config.starvation_s = 5;
  Scheduler scheduler(config);
  ASSERT_TRUE(scheduler.add(make_request(1, 3, {}, /*priority=*/1), 0).ok());
  ASSERT_TRUE(scheduler.add(make_request(2, 3, {}, /*priority=*/0), 1).ok());
  SchedulerOutput output = scheduler.schedule(1);
  EXPECT_EQ(output.sequences.at(0).id.value, 2);
  commit_sevens(scheduler, output);
  scheduler.finish(RequestId{2});
  ASSERT_TRUE(scheduler.add(make_request(3, 3, {}, /*priority=*/0), 6).ok());
  output = scheduler.schedule(6);  // request 1 has waited 6 s
  EXPECT_EQ(output.sequences.at(0).id.value, 1);
  commit_sevens(scheduler, output);
  output = scheduler.schedule(7);  // and request 3 does not take its place
  EXPECT_EQ(output.sequences.at(0).id.value, 1);
}

TEST(Scheduler, AFailedEncodingEndsThoseThatNeedItAndNobodyElse) {
  Scheduler scheduler(small_config());
  ASSERT_TRUE(scheduler.add(make_request(1, 8, {image(1, 2, 4)}), 0).ok());
  ASSERT_TRUE(scheduler.add(make_request(2, 8, {image(2, 2, 4)}), 0).ok());
  ASSERT_TRUE(scheduler.add(make_request(3, 8, {image(1, 3, 4)}), 0).ok());
  const SchedulerOutput output = scheduler.schedule(0);
  ASSERT_EQ(output.encodes.size(), 2u);  // equal images are encoded once
  const std::vector<RequestId> lost = scheduler.commit_encode(output.encodes[0].slot, false);
  EXPECT_EQ(lost, (std::vector<RequestId>{RequestId{1}, RequestId{3}}));
  commit_sevens(scheduler, output);  // their steps were in flight
  scheduler.check_invariants();
  EXPECT_EQ(scheduler.stats().running, 1);
}

TEST(Scheduler, CountsWhatWouldFindRoom) {
  Scheduler scheduler(small_config());
  ASSERT_TRUE(scheduler.add(make_request(1, 8, {image(1, 4, 2)}), 0).ok());
  EXPECT_EQ(scheduler.stats().pending_tokens, 8);
  EXPECT_EQ(scheduler.stats().free_kv_tokens, 64);
  SchedulerOutput output = scheduler.schedule(0);  // the text before the image
  EXPECT_EQ(scheduler.stats().free_kv_tokens, 60);
  EXPECT_EQ(scheduler.stats().encoder_bytes, 300);
  EXPECT_EQ(scheduler.stats().encoder_bytes_held, 100);
  commit_sevens(scheduler, output);
  EXPECT_EQ(scheduler.stats().pending_tokens, 4);
  scheduler.commit_encode(output.encodes.at(0).slot, true);
  EXPECT_EQ(scheduler.stats().encoder_bytes_held, 100);  // its tokens are still to come
  output = scheduler.schedule(1);
  commit_sevens(scheduler, output);
  EXPECT_EQ(scheduler.stats().pending_tokens, 1);  // the one that came out
  EXPECT_EQ(scheduler.stats().encoder_bytes_held, 0);
  EXPECT_EQ(scheduler.stats().encoder_bytes_used, 100);
  scheduler.finish(RequestId{1});
  EXPECT_EQ(scheduler.stats().pending_tokens, 0);
  EXPECT_EQ(scheduler.stats().free_kv_tokens, 64);  // what prefixes keep can be taken from them
}

// As many as the cache has room for, whatever the encoding budget says.
TEST(Scheduler, WhatCostsNothingStartsAtOnce) {
  SchedulerConfig config = small_config();
  config.encode_budget = {16, 16, 16};
  for (const int64_t cost : {int64_t{16}, int64_t{0}}) {
    Scheduler scheduler(config);
    for (int64_t id = 1; id <= 4; ++id) {
      MediaItem item = image(static_cast<uint8_t>(id), 2, 2);
      item.cost = cost;
      ASSERT_TRUE(scheduler.add(make_request(id, 4, {item}), 0).ok());
    }
    EXPECT_EQ(scheduler.schedule(0).encodes.size(), cost == 0 ? 3u : 1u);
  }
}

TEST(Replay, NamesTheDecisionThatDiffersAndTheLineThatMakesNoSense) {
  std::string record;
  RecordedScheduler scheduler(small_config(), [&](std::string_view line) { record += line; });
  ASSERT_TRUE(scheduler.add(make_request(1, 5), 0).ok());
  scheduler.schedule(0);
  ASSERT_EQ(replay(record)->differing_line, 0);
  std::string other = record;
  other.replace(other.find("\"count\":5"), 9, "\"count\":4");
  const auto report = replay(other);
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->differing_line, 4);
  EXPECT_NE(report->recorded, report->replayed);
  std::string shorter = record;  // without the decision
  shorter.erase(shorter.find("{\"decision\""));
  EXPECT_EQ(replay(shorter)->differing_line, 4);
  EXPECT_EQ(replay(shorter + "{\"event\":\"finish\",\"id\":1}\n")->differing_line, 4);
  const auto cut = replay(record.substr(0, record.size() - 3));  // written until the process died
  ASSERT_TRUE(cut.ok());
  EXPECT_TRUE(cut->cut);
  EXPECT_EQ(cut->differing_line, 0);
  EXPECT_EQ(replay("").status().message(), "the record is empty");
  EXPECT_TRUE(absl::StartsWith(replay(record + "{\"event\":\"dance\"}\n").status().message(), "line 5: "));
  EXPECT_TRUE(absl::StartsWith(replay("{}\n").status().message(), "line 1: "));
}

TEST(Replay, RefusesWhatNoEngineCouldHaveTold) {
  std::string record;  // a step of one request is in flight
  RecordedScheduler scheduler(small_config(), [&](std::string_view line) { record += line; });
  ASSERT_TRUE(scheduler.add(make_request(1, 5), 0).ok());
  scheduler.schedule(0);
  const std::string add = R"({"event":"add","now":0,"priority":0,"salt":"","given":0,)";
  const std::string item = R"({"key":")" + std::string(64, 'a') + R"(","modality":0,"cost":1,"bytes":1,)";
  const std::pair<std::string, std::string> lines[] = {
      {"7", "an object was expected, found 7"},
      {R"({"event":"schedule"})", "a step was scheduled while another is in flight"},
      {R"({"event":"commit","step":9,"tokens":[1],"seconds":1})", "step 9 is not in flight"},
      {R"({"event":"commit","step":1,"tokens":[],"seconds":1})", "step 1 gave 0 tokens for 1 sequences"},
      {R"({"event":"commit","step":1,"tokens":[1,2],"seconds":1})", "step 1 gave 2 tokens for 1 sequences"},
      {R"({"event":"commit","step":1,"tokens":[1.5]})", "'tokens' must hold whole numbers, found 1.5"},
      {R"({"event":"commit","step":1,"tokens":[1],"seconds":-1})", "a step took -1 seconds"},
      {R"({"event":"commit_failed","step":2})", "step 2 is not in flight"},
      {R"({"event":"commit_encode","slot":4,"ok":true})", "nothing is being encoded into slot 4"},
      {R"({"event":"commit_kv","id":1,"ok":true})", "the request 1 fetches no keys and values"},
      {R"({"event":"add","now":0,"id":2,"priority":0,"salt":"","given":1,"prompt":[1],"media":[]})",
       "the keys and values of 1 of its 1 tokens are given; the last is computed here"},
      {add + R"("id":1,"prompt":[1],"media":[]})", "the request 1 is there already"},
      {add + R"("id":2,"prompt":[],"media":[]})", "the request has no tokens"},
      {add + R"("id":2,"prompt":[-1],"media":[]})", "'prompt' must be between 0 and 2147483647, found -1"},
      {add + R"("id":2,"prompt":[1,1],"media":[)" + item + R"("begin":1,"length":9223372036854775807}]})",
       "the tokens of media item 1 are not in the prompt behind those of the item before it"},
      {add + R"("id":2,"prompt":[1,1],"media":[{"key":"zz"}]})", "'modality' is missing"}};
  for (const auto& [line, why] : lines) EXPECT_EQ(replay(record + line + "\n").status().message(), "line 5: " + why);
  std::string huge = record;
  huge.replace(huge.find("\"num_blocks\":"), 13, "\"num_blocks\":99999999999");
  EXPECT_THAT(std::string(replay(huge).status().message()), testing::HasSubstr("give the KV memory fewer bytes"));
}

}  // namespace
}  // namespace parvl
