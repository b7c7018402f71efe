#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "tests/unit/fleet_world.h"

namespace parvl {
namespace {

TEST(Fleet, AnImageIsEncodedInOnePoolAndItsAnswerGeneratedInTheOther) {
  World world(two_pools());
  EXPECT_FALSE(world.fleet.fleet().health().ok());
  world.open_all();
  EXPECT_TRUE(world.fleet.fleet().health().ok());
  EXPECT_EQ(world.fleet.fleet().capacity(), 8) << "of the two that generate";
  world.arrive(7, 1, 2);
  EXPECT_EQ(world.processes[0].encodings.size(), 1u);
  world.work(InstanceId{0});
  EXPECT_EQ(world.processes[2].generations.size(), 1u);
  EXPECT_EQ(world.processes[0].held.size(), 1u);
  world.work(InstanceId{2});
  EXPECT_TRUE(world.processes[0].held.empty()) << "its first token is there, so its features were taken over";
  world.work(InstanceId{2});
  EXPECT_EQ(world.clients[7].ends, 1);
  EXPECT_TRUE(world.clients[7].status.ok());
  for (const InstanceView& view : world.fleet.fleet().instances()) EXPECT_EQ(view.running, 0);
}

TEST(Fleet, TextGoesOnElsewhereFromTheTokensThatWereDelivered) {
  World world(two_pools());
  world.open_all();
  world.arrive(1, 0, 5);
  world.work(InstanceId{2});
  world.work(InstanceId{2});
  world.die(InstanceId{2});
  ASSERT_EQ(world.processes[3].generations.size(), 1u);
  EXPECT_EQ(world.processes[3].generations.begin()->second, 2) << "the next token is the third";
  for (int i = 0; i < 3; ++i) world.work(InstanceId{3});
  EXPECT_EQ(world.clients[1].delivered, 5);
  EXPECT_TRUE(world.clients[1].status.ok());
}

TEST(Fleet, WorkWaitsForAnInstanceThatComesBackAndEndsWhenNoneDoes) {
  FleetSettings settings = two_pools();
  settings.pools[1].instances = 1;
  settings.instance.start_s = 1000;
  World world(settings);
  world.open_all();
  world.arrive(1, 0, 3);
  world.work(InstanceId{2});
  world.die(InstanceId{2});
  EXPECT_FALSE(world.fleet.fleet().can_generate().ok());
  EXPECT_THAT(world.fleet.fleet().health().message(),
              ::testing::HasSubstr("pool llm-pool has no instance that is ready"));
  world.arrive(2, 0, 3);
  EXPECT_EQ(world.clients[1].ends + world.clients[2].ends, 0) << "both wait";
  world.pass(1);
  EXPECT_TRUE(world.processes[2].alive) << "started again after half a second";
  world.open(InstanceId{2});
  EXPECT_EQ(world.processes[2].generations.size(), 2u);
  for (int i = 0; i < 5; ++i) world.work(InstanceId{2});
  EXPECT_EQ(world.clients[1].delivered + world.clients[2].delivered, 6);
  world.arrive(3, 0, 3);
  world.die(InstanceId{2});
  world.pass(settings.park_s + 2);  // it starts, and says nothing
  EXPECT_EQ(world.clients[3].ends, 1);
  EXPECT_TRUE(absl::IsUnavailable(world.clients[3].status)) << world.clients[3].status;
}

TEST(Fleet, EqualPromptsGoWhereTheirPrefixIs) {
  World world(two_pools());
  world.open_all();
  FleetRequest request;
  request.needs = {1000, 1100};
  for (uint64_t i = 0; i < 62; ++i) request.chain.push_back(i);
  std::vector<int64_t> where;
  for (int64_t id = 1; id <= 3; ++id) {
    world.lengths[id] = 1;
    world.take(world.fleet.arrive(RequestId{id}, request, world.now));
    for (int64_t i = 2; i < 4; ++i) {
      if (world.processes[i].generations.contains({id, 1})) where.push_back(i);
    }
    world.take(world.fleet.request(RequestId{id}, {.kind = Tell::kToken, .attempt = 1, .index = 0}, world.now));
    world.take(world.fleet.request(RequestId{id}, {.kind = Tell::kFinished, .attempt = 1}, world.now));
  }
  EXPECT_THAT(where, ::testing::ElementsAre(2, 2, 2));
}

TEST(Fleet, ImagesOfOneRequestAreSpreadAndOneThatFailedIsTriedElsewhere) {
  World world(two_pools());
  world.open_all();
  world.arrive(1, 2, 3);
  EXPECT_EQ(world.processes[0].encodings.size(), 1u);
  EXPECT_EQ(world.processes[1].encodings.size(), 1u);
  const auto [request, item, attempt] = *world.processes[0].encodings.begin();
  world.processes[0].encodings.clear();
  const absl::Status gone = absl::UnavailableError("its pixels did not come");
  world.take(world.fleet.request(
      RequestId{1},
      {.kind = Tell::kEncodingFailed, .instance = InstanceId{0}, .item = item, .attempt = attempt, .status = gone},
      world.now));
  EXPECT_EQ(world.processes[0].encodings.size(), 0u) << "it has just failed there";
  EXPECT_EQ(world.processes[1].encodings.size(), 2u);
  world.work(InstanceId{1});
  world.work(InstanceId{1});
  const int64_t first = world.processes[2].generations.empty() ? 3 : 2, other = 5 - first;
  world.processes[first].generations.clear();
  world.take(world.fleet.request(
      RequestId{1}, {.kind = Tell::kGenerationFailed, .instance = InstanceId{first}, .attempt = 1, .status = gone},
      world.now));
  EXPECT_EQ(world.processes[other].generations.size(), 1u);
  EXPECT_EQ(world.fleet.fleet().instances()[static_cast<size_t>(first)].running, 0);
}

TEST(Fleet, AProcessThatIsStartedAgainMayTakeItsTimeForItsFirstStep) {
  World world(two_pools());
  world.open_all();
  world.take_steps(InstanceId{2}, 50, 0.01);
  world.die(InstanceId{2});
  world.pass(1);
  world.say(InstanceId{2}, Said::kHello);
  world.say(InstanceId{2}, Said::kLoaded);
  world.take(world.fleet.step_began(InstanceId{2}, 2, {StepLane::kBackbone, 16}, world.now));
  world.pass(20);
  EXPECT_EQ(world.fleet.fleet().instances()[2].state, State::kWarming);
}

TEST(Fleet, AHungStepIsFoundByWhatStepsOfItsSizeHaveTaken) {
  World world(two_pools());
  world.open_all();
  world.take_steps(InstanceId{2}, 50, 0.01);
  world.arrive(1, 0, 5);
  world.take(world.fleet.step_began(InstanceId{2}, 1, {StepLane::kBackbone, 16}, world.now));
  world.pass(2.9);
  EXPECT_EQ(world.fleet.fleet().instances()[2].state, State::kReady);
  world.pass(0.2);
  EXPECT_EQ(world.fleet.fleet().instances()[2].state, State::kFailed) << "three seconds are the least";
  EXPECT_EQ(world.processes[3].generations.size(), 1u);
  world.take(world.fleet.step_ended(InstanceId{2}, 1, {StepLane::kBackbone, 16, 3.2}, world.now));
  EXPECT_EQ(world.fleet.fleet().instances()[2].stale, 1) << "what it says later has no effect";
}

TEST(Fleet, AHungEncodingIsFoundBesideStepsThatEnd) {
  World world(two_pools());
  world.open_all();
  world.take_steps(InstanceId{2}, 50, 0.01);
  world.take_steps(InstanceId{2}, 50, 0.01, StepLane::kEncoder);
  world.take(world.fleet.step_began(InstanceId{2}, 1, {StepLane::kEncoder, 16}, world.now));
  for (int second = 0; second < 2; ++second) {
    world.take_steps(InstanceId{2}, 1, 0.01);
    world.pass(1);
  }
  EXPECT_EQ(world.fleet.fleet().instances()[2].state, State::kReady);
  world.take_steps(InstanceId{2}, 1, 0.01);
  world.pass(1.1);
  EXPECT_EQ(world.fleet.fleet().instances()[2].state, State::kFailed);
  EXPECT_EQ(world.fleet.fleet().instances()[2].reason, "a step took too long");
}

TEST(Fleet, AnAnswerIsBegunInOnePoolAndGoesOnInTheOther) {
  World world(halves(true));
  EXPECT_FALSE(world.fleet.fleet().can_generate().ok());
  for (const int64_t id : {0, 1, 2, 3}) world.open(InstanceId{id});
  EXPECT_THAT(world.fleet.fleet().can_generate().message(),
              ::testing::HasSubstr("decode-pool: instance 4 is starting"));
  world.open_all();
  EXPECT_TRUE(world.fleet.fleet().can_generate().ok());
  EXPECT_EQ(world.fleet.fleet().capacity(), 8) << "of the two where answers stay";
  world.arrive(7, 1, 3);
  world.work(InstanceId{0});
  ASSERT_EQ(world.processes[2].generations.size(), 1u);
  world.work(InstanceId{2});
  EXPECT_EQ(world.clients[7].delivered, 1);
  EXPECT_EQ(world.processes[2].kv.size(), 1u);
  EXPECT_EQ(world.processes[0].held.size(), 1u) << "whoever goes on may need the image";
  ASSERT_EQ(world.processes[4].generations.size(), 1u);
  world.work(InstanceId{4});
  EXPECT_TRUE(world.processes[2].kv.empty());
  EXPECT_TRUE(world.processes[0].held.empty());
  world.work(InstanceId{4});
  EXPECT_EQ(world.clients[7].ends, 1);
  EXPECT_TRUE(world.clients[7].status.ok());
  for (const InstanceView& view : world.fleet.fleet().instances()) EXPECT_EQ(view.running, 0);
}

TEST(Fleet, WhoeverHoldsKeysAndValuesIsNotGoneBeforeTheyAreTaken) {
  World world(halves(false));
  world.open_all();
  world.arrive(1, 0, 3);
  world.work(InstanceId{0});
  ASSERT_EQ(world.processes[2].generations.size(), 1u);
  world.take(world.fleet.instance(InstanceId{0}, {.kind = Said::kDrain, .at_s = world.now}));
  EXPECT_EQ(world.processes[0].orders.back(), Order::kClose);
  world.work(InstanceId{2});
  EXPECT_EQ(world.processes[0].orders.back(), Order::kRelease);
}

TEST(Fleet, AnAnswerWaitsForADecodePoolThatComesBack) {
  FleetSettings settings = halves(false);
  settings.pools[1].instances = 1;
  World world(settings);
  world.open_all();
  world.arrive(1, 0, 3);
  world.work(InstanceId{0});
  world.die(InstanceId{2});
  EXPECT_FALSE(world.fleet.fleet().can_generate().ok());
  EXPECT_EQ(world.fleet.fleet().capacity(), 0);
  EXPECT_EQ(world.processes[0].kv.size(), 1u) << "it was not taken, so it is kept for the next one";
  world.pass(1);
  world.open(InstanceId{2});
  ASSERT_EQ(world.processes[2].generations.size(), 1u);
  world.work(InstanceId{2});
  world.work(InstanceId{2});
  EXPECT_TRUE(world.clients[1].status.ok());
  EXPECT_EQ(world.clients[1].delivered, 3);
}

// Whatever dies, comes back, drains or leaves in whatever order: each request ends once with all its tokens, or with a
// reason, and nothing stays counted.
RC_GTEST_PROP(Fleet, EveryRequestEndsOnce, ()) {
  const int shape = *rc::gen::inRange(0, 3);
  FleetSettings settings = shape == 0 ? two_pools() : halves(shape == 1);
  if (shape == 0) settings.pools[1].encodes = *rc::gen::arbitrary<bool>();
  settings.add_after_s = *rc::gen::element(0.0, 1.0, 5.0);
  settings.add_idle_s = *rc::gen::element(0.0, 1.0, 60.0);
  const bool comes_back = *rc::gen::arbitrary<bool>();
  World world(settings);
  int64_t next = 1;
  const auto count = static_cast<int64_t>(world.fleet.fleet().instances().size());
  const auto some = [count] { return InstanceId{*rc::gen::inRange<int64_t>(0, count)}; };
  const int steps = *rc::gen::inRange(10, 150);
  for (int i = 0; i < steps; ++i) {
    const int dice = *rc::gen::inRange(0, 18);
    const InstanceId id = some();
    if (dice < 2) world.open(id);
    if (dice == 2) world.die(id);
    if (dice == 3) world.pass(*rc::gen::element(0.1, 0.6, 2.0, 40.0));
    if (dice >= 4 && dice < 7 && next < 12) {
      const size_t items = shape == 2 ? 0 : *rc::gen::inRange<size_t>(0, 3);
      world.arrive(next++, items, *rc::gen::inRange(1, 6));
    }
    if (dice >= 7 && dice < 14) world.work(id);
    if (dice == 14 && next > 1) {
      world.take(world.fleet.request(RequestId{*rc::gen::inRange<int64_t>(1, next)}, {.kind = Tell::kLeft}, world.now));
    }
    if (dice >= 16) world.add(id, *rc::gen::inRange(0, 3) > 0);
    if (dice == 15 && *rc::gen::inRange(0, 8) == 0) {
      world.take(world.fleet.instance(id, {.kind = Said::kDrain, .at_s = world.now}));
    }
  }
  for (int round = 0; round < 60 && world.fleet.fleet().requests() > 0; ++round) {
    if (comes_back || round > 3) world.open_all();
    for (int64_t id = 0; id < count; ++id) world.add(InstanceId{id}, true);
    for (int i = 0; i < 10; ++i) {
      for (int64_t id = 0; id < count; ++id) world.work(InstanceId{id});
    }
    world.pass(31);
  }
  RC_ASSERT(world.fleet.fleet().requests() == 0u);
  for (const auto& [id, client] : world.clients) {
    RC_ASSERT(client.ends == 1);
    RC_ASSERT(client.delivered <= world.lengths[id]);
    RC_ASSERT(!client.status.ok() || client.delivered == world.lengths[id]);
  }
  for (const InstanceView& view : world.fleet.fleet().instances()) RC_ASSERT(view.running == 0);
  for (const auto& [id, process] : world.processes)
    RC_ASSERT((process.held.empty() && process.kv.empty()) || !process.alive);
  const auto report = replay_fleet(world.record);
  RC_ASSERT(report.ok());
  RC_ASSERT(report->differing_line == 0);
}

TEST(FleetRecord, TheSameEventsGiveTheSameDecisionsAndOthersAreNamed) {
  World world(two_pools());
  world.open_all();
  world.arrive(1, 2, 4);
  world.work(InstanceId{0});
  world.work(InstanceId{1});
  world.die(InstanceId{0});
  for (int i = 0; i < 4; ++i) world.work(InstanceId{2});
  const auto report = replay_fleet(world.record);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->differing_line, 0) << report->recorded << report->replayed;
  EXPECT_GT(report->events, 15);
  EXPECT_GT(report->decisions, 10);
  EXPECT_TRUE(is_fleet_record(world.record));

  std::string other = world.record;
  const size_t at = other.find("{\"decision\":[[\"request\"");
  ASSERT_NE(at, std::string::npos);
  other.replace(other.find("\"request\",1", at), 11, "\"request\",9");
  const auto differing = replay_fleet(other);
  ASSERT_TRUE(differing.ok());
  EXPECT_GT(differing->differing_line, 0);
  EXPECT_NE(differing->recorded, differing->replayed);

  const size_t cut = world.record.find('\n', world.record.size() / 2);
  EXPECT_TRUE(replay_fleet(world.record.substr(0, cut - 3))->cut);
  for (const char* text : {"", "{}\n", "[]\n", "{\"fleet_record\": 3}\n",
                           "{\"fleet_record\":4,\"pools\":[[\"a\",-1,true,true,false,false]]}\n"}) {
    EXPECT_FALSE(replay_fleet(text).ok()) << text;
  }
  const std::string settings = world.record.substr(0, world.record.find('\n') + 1);
  for (const char* line : {"{\"event\":\"tick\",\"at\":0}", "{\"event\":\"start\"}", "{\"event\":3}", "7",
                           "{\"event\":\"instance\",\"id\":9,\"what\":[0,0,1,0,0,0]}"}) {
    EXPECT_FALSE(replay_fleet(settings + line + "\n").ok()) << line;
  }
  const size_t second = world.record.find('\n', settings.size()) + 1;
  const std::string begun = world.record.substr(0, world.record.find('\n', second) + 1);
  for (const char* line :
       {"{\"event\":\"instance\",\"id\":9,\"what\":[0,0,1,0,0,0]}",
        "{\"event\":\"instance\",\"id\":0,\"what\":[77,0,1,0,0,0]}",
        "{\"event\":\"request\",\"id\":0,\"at\":0,\"what\":[0,0,0,0,0,0]}",
        "{\"event\":\"arrive\",\"id\":5,\"at\":0,\"shape\":[1,1,8,5],\"needs\":[1,1],\"chain\":[],\"patches\":[],"
        "\"item_key\":[]}",
        "{\"event\":\"nothing\",\"id\":0}"}) {
    const auto refused = replay_fleet(begun + line + "\n");
    EXPECT_FALSE(refused.ok()) << line;
    EXPECT_THAT(refused.status().message(), ::testing::HasSubstr("line 4")) << line;
  }
}

TEST(FleetRecord, ChoosesByTheCostsThatTheFleetHad) {
  FleetSettings settings = two_pools();
  settings.block_tokens = 1;
  settings.costs.pause = 0;
  World world(settings);
  world.open_all();
  world.arrive(1, 0, 9);
  world.work(InstanceId{2});  // it decodes
  world.arrive(2, 0, 9);
  world.arrive(3, 0, 9);
  EXPECT_EQ(world.processes[2].generations.size(), 2u) << "with the usual costs the last one would spare its answer";
  const auto report = replay_fleet(world.record);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->differing_line, 0) << report->recorded << report->replayed;
}

TEST(PrefixIndex, ForgetsTheLeastRecentlyUsedAndTheEndsOfChainsFirst) {
  PrefixIndex index(4);
  const std::vector<uint64_t> a = {1, 2, 3}, b = {1, 5};
  index.add(a);
  index.add(b);
  EXPECT_EQ(index.match(a), 3u);
  EXPECT_EQ(index.match(b), 2u);
  index.add(std::vector<uint64_t>{9});
  EXPECT_EQ(index.size(), 4u);
  EXPECT_EQ(index.match(a), 2u) << "its end went, not its beginning";
  index.clear();
  EXPECT_EQ(index.match(b), 0u);
}

}  // namespace
}  // namespace parvl
