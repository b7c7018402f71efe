// Instances that somebody wants gone, and what becomes of the requests there.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "tests/unit/fleet_world.h"

namespace parvl {
namespace {

TEST(Drain, DrainingOneEndsWhenNothingRunsThere) {
  World world(two_pools());
  world.open_all();
  world.arrive(1, 0, 2);
  world.take(world.fleet.instance(InstanceId{2}, {.kind = Said::kDrain, .at_s = world.now}));
  EXPECT_EQ(world.fleet.fleet().instances()[2].state, State::kDraining);
  world.arrive(2, 0, 1);
  EXPECT_EQ(world.processes[3].generations.size(), 1u);
  world.work(InstanceId{2});
  EXPECT_NE(world.processes[2].orders.back(), Order::kRelease);
  world.work(InstanceId{2});
  EXPECT_EQ(world.processes[2].orders.back(), Order::kRelease);
  world.die(InstanceId{2});
  EXPECT_EQ(world.fleet.fleet().instances()[2].state, State::kGone);
  EXPECT_EQ(world.clients[1].ends, 1);
}

TEST(Drain, TheLastOneToGenerateFinishesWhatItHasHoweverLongThatTakes) {
  World world(two_pools());
  world.open_all();
  for (const int64_t id : {1, 2}) world.arrive(id, 0, 2);
  world.arrive(3, 1, 1);
  const auto drain = [&](int64_t id) {
    world.take(world.fleet.instance(InstanceId{id}, {.kind = Said::kDrain, .at_s = world.now}));
  };
  drain(2);
  ASSERT_EQ(world.processes[2].generations.size(), 1u);
  world.pass(world.settings.instance.drain_s + 1);
  EXPECT_EQ(world.processes[2].orders.back(), Order::kRelease);
  ASSERT_EQ(world.processes[3].generations.size(), 2u) << "somebody else took it in the end";
  drain(3);
  world.pass(world.settings.instance.drain_s + 1);
  EXPECT_EQ(world.clients[1].ends + world.clients[2].ends, 0);
  for (int i = 0; i < 4; ++i) world.work(InstanceId{3});
  EXPECT_NE(world.processes[3].orders.back(), Order::kRelease) << "an image of a request under way is being encoded";
  world.arrive(4, 0, 1);
  EXPECT_FALSE(world.clients[4].status.ok()) << "a new one is not taken";
  for (const int64_t id : {0, 1}) world.work(InstanceId{id});
  world.work(InstanceId{3});
  for (const int64_t id : {1, 2, 3}) EXPECT_TRUE(world.clients[id].status.ok() && world.clients[id].ends == 1) << id;
  EXPECT_EQ(world.processes[3].orders.back(), Order::kRelease);
  EXPECT_EQ(replay_fleet(world.record)->differing_line, 0);
}

TEST(Drain, WorkThatWaitsEndsAtOnceWhenWhoItWaitsForIsDrained) {
  for (const size_t items : {size_t{0}, size_t{1}}) {
    FleetSettings settings = two_pools();
    for (FleetPool& pool : settings.pools) pool.instances = 1;
    World world(settings);
    world.open_all();
    const auto drain = [&](int64_t id) {
      world.take(world.fleet.instance(InstanceId{id}, {.kind = Said::kDrain, .at_s = world.now}));
    };
    for (const int64_t id : {0, 1}) world.die(InstanceId{id});
    EXPECT_TRUE(absl::IsUnavailable(world.fleet.fleet().can_generate()));
    EXPECT_TRUE(world.fleet.fleet().will_generate().ok()) << "it is started again";
    world.arrive(1, items, 1);
    EXPECT_EQ(world.fleet.fleet().parked(items > 0), 1);
    drain(0);
    EXPECT_EQ(world.clients[1].ends, 0) << "the LLM's may take the encoder on when it is back";
    EXPECT_TRUE(world.fleet.fleet().will_generate().ok());
    drain(1);
    EXPECT_EQ(world.clients[1].ends, 1);
    EXPECT_TRUE(absl::IsUnavailable(world.clients[1].status)) << world.clients[1].status;
    EXPECT_TRUE(absl::IsUnavailable(world.fleet.fleet().will_generate()));
    EXPECT_EQ(replay_fleet(world.record)->differing_line, 0);
  }
}

TEST(Drain, NobodyIsLeftToGenerateOnceEitherHalfIsDrained) {
  for (const int64_t first : {0, 2}) {
    World world(halves(false));
    world.open_all();
    for (const int64_t id : {first, first + 1}) {
      EXPECT_TRUE(world.fleet.fleet().will_generate().ok());
      world.take(world.fleet.instance(InstanceId{id}, {.kind = Said::kDrain, .at_s = world.now}));
    }
    EXPECT_TRUE(absl::IsUnavailable(world.fleet.fleet().will_generate()));
  }
}

// Nobody dies: whatever is drained, and however slowly all goes, no request that was taken before fails.
RC_GTEST_PROP(Drain, NoDrainEndsARequestUnderWay, ()) {
  const int shape = *rc::gen::inRange(0, 3);
  World world(shape == 0 ? two_pools() : halves(shape == 1));
  const auto count = static_cast<int64_t>(world.fleet.fleet().instances().size());
  const auto some = [count] { return InstanceId{*rc::gen::inRange<int64_t>(0, count)}; };
  const auto work = [&](int times) {
    for (int i = 0; i < times; ++i) world.work(some());
  };
  world.open_all();
  for (int64_t id = 1; id < 8; ++id) {
    world.arrive(id, shape == 2 ? 0 : *rc::gen::inRange<size_t>(0, 3), *rc::gen::inRange(1, 6));
    work(*rc::gen::inRange(0, 4));
  }
  for (int i = 0; i < 8; ++i) {
    world.take(world.fleet.instance(some(), {.kind = Said::kDrain, .at_s = world.now}));
    work(*rc::gen::inRange(0, 8));
    world.pass(*rc::gen::element(0.1, 2.0, 40.0));
  }
  for (int round = 0; round < 60 && world.fleet.fleet().requests() > 0; ++round) {
    for (int64_t id = 0; id < count; ++id) {
      world.add(InstanceId{id}, true);
      world.work(InstanceId{id});
    }
    world.pass(1);
  }
  for (const auto& [id, client] : world.clients) {
    RC_ASSERT(client.ends == 1);
    RC_ASSERT(client.status.ok());
    RC_ASSERT(client.delivered == world.lengths[id]);
  }
  for (const InstanceView& one : world.fleet.fleet().instances())
    RC_ASSERT(one.state != State::kDraining || !one.running);
}

}  // namespace
}  // namespace parvl
