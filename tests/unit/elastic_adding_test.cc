// A fleet whose encoders are gone: who takes the encoder on, when, and until when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/fleet_world.h"

namespace parvl {
namespace {

class AddingFleet : public ::testing::Test {
 protected:
  AddingFleet() : world_(settings()) { world_.open_all(); }
  static FleetSettings settings() {
    FleetSettings out = two_pools();
    out.instance.start_s = 1000;  // encoders that are started again say nothing
    return out;
  }
  void kill_encoders() {
    for (const int64_t id : {0, 1}) world_.die(InstanceId{id});
  }
  const Fleet& fleet() const { return world_.fleet.fleet(); }
  bool was_told(int64_t id, Order order) {
    const std::vector<Order>& orders = world_.processes[id].orders;
    return std::find(orders.begin(), orders.end(), order) != orders.end();
  }
  World world_;
};

TEST_F(AddingFleet, OneThatGeneratesTakesTheEncoderOnWhileNobodyElseEncodes) {
  kill_encoders();
  world_.arrive(1, 0, 9);  // keeps instance 2 busy
  EXPECT_EQ(world_.processes[2].generations.size(), 1u);
  EXPECT_TRUE(fleet().can_encode(world_.now).ok()) << "soon";
  world_.arrive(2, 2, 3);
  EXPECT_EQ(fleet().parked(true), 2);
  world_.pass(4.9);
  EXPECT_FALSE(was_told(2, Order::kAdd) || was_told(3, Order::kAdd)) << "the pool's own may be back";
  world_.pass(0.2);
  EXPECT_TRUE(was_told(3, Order::kAdd)) << "it has the least to do";
  EXPECT_FALSE(was_told(2, Order::kAdd)) << "one is enough";
  EXPECT_EQ(fleet().instances()[3].added, AddedEncoder::kAdding);
  EXPECT_EQ(world_.processes[3].encodings.size(), 0u) << "it is not there yet";
  world_.say(InstanceId{3}, Said::kAdded);
  EXPECT_EQ(fleet().instances()[3].added, AddedEncoder::kEncodes);
  EXPECT_EQ(world_.processes[3].encodings.size(), 2u);
  EXPECT_EQ(fleet().parked(true), 0);
  for (int i = 0; i < 2; ++i) world_.work(InstanceId{3});
  for (int i = 0; i < 12; ++i) {
    world_.work(InstanceId{2});
    world_.work(InstanceId{3});
  }
  EXPECT_TRUE(world_.clients[2].status.ok() && world_.clients[2].ends == 1);
  EXPECT_EQ(world_.clients[1].delivered, 9) << "text is as it was";
  world_.arrive(3, 1, 1);
  EXPECT_EQ(world_.processes[3].encodings.size(), 1u) << "at once";
}

TEST_F(AddingFleet, ThePoolsOwnAreAskedFirstAndWhatWasAddedIsGivenBackOnceItIsIdle) {
  kill_encoders();
  world_.arrive(1, 1, 2);
  world_.pass(6);
  world_.say(InstanceId{2}, Said::kAdded);
  world_.open(InstanceId{0});
  world_.arrive(2, 1, 2);
  EXPECT_EQ(world_.processes[0].encodings.size(), 1u);
  EXPECT_EQ(world_.processes[2].encodings.size(), 1u) << "the one that it was added for";
  world_.pass(100);
  EXPECT_EQ(fleet().instances()[2].added, AddedEncoder::kEncodes) << "it is at work";
  world_.work(InstanceId{2});
  for (int i = 0; i < 8; ++i) {
    world_.work(InstanceId{2});
    world_.work(InstanceId{3});
  }
  EXPECT_EQ(world_.clients[1].ends, 1);
  world_.pass(settings().add_idle_s - 1);
  EXPECT_FALSE(was_told(2, Order::kGiveBack));
  world_.pass(2);
  EXPECT_TRUE(was_told(2, Order::kGiveBack));
  EXPECT_EQ(fleet().instances()[2].added, AddedEncoder::kNone);
  // And again.
  world_.die(InstanceId{0});
  world_.arrive(3, 1, 1);
  world_.pass(6);
  EXPECT_TRUE(fleet().instances()[2].added == AddedEncoder::kAdding ||
              fleet().instances()[3].added == AddedEncoder::kAdding);
}

TEST_F(AddingFleet, OneThatRefusesGoesOnAndAnotherIsAsked) {
  kill_encoders();
  world_.arrive(1, 1, 2);
  world_.pass(6);
  ASSERT_TRUE(was_told(2, Order::kAdd));
  world_.say(InstanceId{2}, Said::kAddRefused);
  EXPECT_EQ(fleet().instances()[2].state, State::kReady);
  EXPECT_EQ(fleet().instances()[2].failures, 0);
  EXPECT_TRUE(was_told(3, Order::kAdd));
  EXPECT_TRUE(fleet().can_encode(world_.now).ok());
  world_.say(InstanceId{3}, Said::kAddRefused);
  const absl::Status nobody = fleet().can_encode(world_.now);
  EXPECT_TRUE(absl::IsUnavailable(nobody));
  EXPECT_THAT(nobody.message(), ::testing::HasSubstr("encoder-pool: instance 0 is"));
  EXPECT_TRUE(fleet().can_generate().ok());
  EXPECT_EQ(world_.clients[1].ends, 0) << "it may wait for its time";
  world_.pass(settings().park_s - 7);
  EXPECT_EQ(world_.clients[1].ends, 0);
  world_.pass(2);
  EXPECT_EQ(world_.clients[1].ends, 1);
  EXPECT_TRUE(absl::IsUnavailable(world_.clients[1].status));
  world_.pass(settings().add_again_s);
  EXPECT_TRUE(fleet().can_encode(world_.now).ok()) << "it may be asked again";
}

TEST_F(AddingFleet, OneThatDoesNotTakeItOnInTimeIsNotWaitedFor) {
  kill_encoders();
  world_.arrive(1, 1, 2);
  world_.pass(6);
  ASSERT_TRUE(was_told(2, Order::kAdd));
  world_.pass(settings().instance.load_s + settings().instance.warm_s);
  EXPECT_TRUE(was_told(2, Order::kGiveBack)) << "it goes back when it comes after all";
  EXPECT_EQ(fleet().instances()[2].state, State::kReady);
  world_.say(InstanceId{2}, Said::kAdded);
  EXPECT_EQ(fleet().instances()[2].added, AddedEncoder::kNone) << "late";
}

TEST_F(AddingFleet, AnAnswerToAnOrderThatWasGivenBackIsNotTakenForTheNextOnes) {
  for (const Said late : {Said::kAdded, Said::kAddRefused}) {
    World world(settings());
    world.open_all();
    world.take(world.fleet.instance(InstanceId{3}, {.kind = Said::kDrain, .at_s = world.now}));  // nobody else
    for (const int64_t id : {0, 1}) world.die(InstanceId{id});
    const auto added = [&] { return world.fleet.fleet().instances()[2].added; };
    const auto add = [&](int64_t request) {
      world.arrive(request, 1, 2);
      world.pass(6);
      ASSERT_EQ(added(), AddedEncoder::kAdding);
    };
    add(1);
    const int64_t first = world.processes[2].adds;
    world.pass(settings().instance.load_s + settings().instance.warm_s + settings().add_again_s);
    add(2);
    world.take(world.fleet.instance(
        InstanceId{2}, {.kind = late, .at_s = world.now, .epoch = world.processes[2].epoch, .number = first}));
    EXPECT_EQ(added(), AddedEncoder::kAdding) << "it is not there: it was given back";
    EXPECT_TRUE(world.processes[2].encodings.empty());
    world.say(InstanceId{2}, Said::kAdded);
    EXPECT_EQ(added(), AddedEncoder::kEncodes);
    EXPECT_EQ(world.processes[2].encodings.size(), 1u);
    EXPECT_EQ(replay_fleet(world.record)->differing_line, 0);
  }
}

TEST_F(AddingFleet, WhoWaitsForAnEncoderLeavesTurnsToOthers) {
  kill_encoders();
  for (int64_t id = 1; id <= 4; ++id) world_.arrive(id, 2, 1);  // half of what two times four compute at once
  EXPECT_EQ(fleet().parked(true), 8);
  EXPECT_TRUE(absl::IsUnavailable(fleet().can_encode(world_.now)));
  world_.arrive(5, 1, 1);
  EXPECT_EQ(world_.clients[5].ends, 1) << "it has come in between";
  EXPECT_TRUE(absl::IsUnavailable(world_.clients[5].status));
  world_.arrive(6, 0, 1);
  EXPECT_EQ(world_.processes[2].generations.size() + world_.processes[3].generations.size(), 1u);
  world_.pass(6);
  world_.say(InstanceId{2}, Said::kAdded);
  world_.say(InstanceId{3}, Said::kAdded);
  EXPECT_EQ(fleet().parked(true), 0);
}

TEST_F(AddingFleet, AProcessThatDiesHasAddedNothing) {
  kill_encoders();
  world_.arrive(1, 1, 2);
  world_.pass(6);
  world_.say(InstanceId{2}, Said::kAdded);
  EXPECT_EQ(world_.processes[2].encodings.size(), 1u);
  world_.die(InstanceId{2});
  EXPECT_EQ(fleet().instances()[2].added, AddedEncoder::kNone);
  EXPECT_EQ(fleet().parked(true), 1);
  world_.pass(6);
  EXPECT_TRUE(was_told(3, Order::kAdd));
}

}  // namespace
}  // namespace parvl
