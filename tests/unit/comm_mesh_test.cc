// Layouts of modules over ranks: the order of the contract, and what must hold for every grid.
#include <gmock/gmock.h>

#include <map>
#include <set>

#include "parvl/comm/device_mesh.h"
#include "tests/unit/comm_fixture.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

ModuleLayout layout(int64_t tp, int64_t sp, int64_t dp, int64_t pp) {
  ModuleLayout out;
  out.tp = tp;
  out.sp = sp;
  out.dp = dp;
  out.pp = pp;
  return out;
}

// All layouts of at most `most` ranks.
std::vector<ModuleLayout> layouts(int64_t most) {
  std::vector<ModuleLayout> out;
  for (int64_t tp = 1; tp <= most; ++tp) {
    for (int64_t sp = 1; tp * sp <= most; ++sp) {
      for (int64_t dp = 1; tp * sp * dp <= most; ++dp) {
        for (int64_t pp = 1; tp * sp * dp * pp <= most; ++pp) out.push_back(layout(tp, sp, dp, pp));
      }
    }
  }
  return out;
}

TEST(RankGrid, TheFirstAxisIsTheFastest) {
  const RankGrid grid({{"tp", 2}, {"sp", 1}, {"dp", 2}, {"pp", 3}}, 4);
  EXPECT_EQ(grid.size(), 12);
  EXPECT_EQ(grid.coordinate(4 + 7, "tp"), 1);
  EXPECT_EQ(grid.coordinate(4 + 7, "dp"), 1);
  EXPECT_EQ(grid.coordinate(4 + 7, "pp"), 1);
  EXPECT_THAT(grid.group_of(11, {"tp"}), ElementsAre(10, 11));
  EXPECT_THAT(grid.group_of(11, {"dp"}), ElementsAre(9, 11));
  EXPECT_THAT(grid.group_of(11, {"pp"}), ElementsAre(7, 11, 15));
  EXPECT_THAT(grid.group_of(11, {"pp", "tp"}), ElementsAre(6, 7, 10, 11, 14, 15));
  EXPECT_THAT(grid.groups({"tp", "sp", "dp"}),
              ElementsAre(ElementsAre(4, 5, 6, 7), ElementsAre(8, 9, 10, 11), ElementsAre(12, 13, 14, 15)));
}

// For every grid of at most 64 ranks and every set of axes.
TEST(RankGrid, GroupsOfAnyAxesPartitionTheRanks) {
  const std::vector<std::string> names = {"tp", "sp", "dp", "pp"};
  for (const ModuleLayout& l : layouts(64)) {
    const RankGrid grid({{"tp", l.tp}, {"sp", l.sp}, {"dp", l.dp}, {"pp", l.pp}});
    for (int set = 0; set < 16; ++set) {
      std::vector<std::string> axes;
      int64_t size = 1;
      for (size_t i = 0; i < names.size(); ++i) {
        if ((set >> i & 1) == 0) continue;
        axes.push_back(names[i]);
        size *= grid.size(names[i]);
      }
      std::set<int64_t> seen;
      for (const std::vector<int64_t>& group : grid.groups(axes)) {
        ASSERT_EQ(static_cast<int64_t>(group.size()), size);
        ASSERT_TRUE(std::is_sorted(group.begin(), group.end()));
        for (const int64_t rank : group) {
          ASSERT_TRUE(seen.insert(rank).second);
          ASSERT_EQ(grid.group_of(rank, axes), group);
          // What is not along the axes is equal in the group.
          for (const std::string& name : names) {
            if (std::find(axes.begin(), axes.end(), name) != axes.end()) continue;
            ASSERT_EQ(grid.coordinate(rank, name), grid.coordinate(group[0], name));
          }
        }
      }
      ASSERT_EQ(static_cast<int64_t>(seen.size()), grid.size());
    }
  }
}

// For every layout of at most 64 ranks: what a rank needs exists, once, and every group's name is its own.
TEST(MeshPlan, EveryRankHasItsGroupsOnce) {
  for (const ModuleLayout& l : layouts(64)) {
    ParallelSpec spec;
    spec.llm = l;
    for (int64_t ep = 1; ep <= l.dp * l.sp; ++ep) {
      if (l.dp * l.sp % ep != 0) continue;
      spec.llm.ep = ep;
      const auto plan = plan_mesh(spec, {"vision_encoder", "projector"});
      ASSERT_TRUE(plan.ok()) << plan.status();
      ASSERT_EQ(plan->world, l.product());
      std::set<std::string> names;
      std::map<std::pair<std::string, int64_t>, int> memberships;  // (kind of group, rank)
      for (const GroupSpec& group : plan->groups) {
        ASSERT_TRUE(names.insert(group.name).second) << group.name;
        ASSERT_GE(group.ranks.size(), 2u);
        ASSERT_TRUE(std::is_sorted(group.ranks.begin(), group.ranks.end()));
        const std::string kind = group.name.substr(0, group.name.find('['));
        for (const int64_t rank : group.ranks) ++memberships[{kind, rank}];
      }
      const ModuleMesh& llm = *plan->find("llm_backbone");
      for (int64_t rank = 0; rank < plan->world; ++rank) {
        for (const char* axis : {"tp", "sp"}) {
          const int expected = llm.grid.size(axis) > 1 ? 1 : 0;
          ASSERT_EQ((memberships[{std::string("llm_backbone.") + axis, rank}]), expected);
        }
        ASSERT_EQ((memberships[{"llm_backbone.data", rank}]), l.dp * l.sp > 1 ? 1 : 0);
        ASSERT_EQ((memberships[{"llm_backbone.ep", rank}]), ep > 1 ? 1 : 0);
        ASSERT_EQ((memberships[{"llm_backbone.edp", rank}]), ep > 1 && l.dp * l.sp > ep ? 1 : 0);
        // Two directions to each neighbour.
        const int64_t stage = llm.grid.coordinate(rank, "pp");
        const int neighbours = (stage > 0 ? 1 : 0) + (stage + 1 < l.pp ? 1 : 0);
        ASSERT_EQ((memberships[{"llm_backbone.pp", rank}]), 2 * neighbours);
        ASSERT_EQ((memberships[{"vision_encoder.data", rank}]), plan->world > 1 ? 1 : 0);
      }
    }
  }
}

TEST(MeshPlan, AModuleOnItsOwnRanksComesLast) {
  ParallelSpec spec;
  spec.llm = layout(2, 1, 1, 2);
  spec.vision_encoder = layout(1, 1, 2, 1);
  spec.vision_encoder->ranks = 2;
  const auto plan = plan_mesh(spec, {"vision_encoder", "projector"});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->world, 6);
  EXPECT_EQ(plan->find("vision_encoder")->grid.first(), 4);
  EXPECT_TRUE(plan->find("vision_encoder")->own_ranks);
  EXPECT_EQ(plan->find("projector")->grid.first(), 4);  // follows
  EXPECT_EQ(rank_table(*plan),
            "rank  llm_backbone (tp sp dp pp)    vision_encoder (tp sp dp pp)  projector (tp sp dp pp)\n"
            "   0  0 0 0 0                       -                             -\n"
            "   1  1 0 0 0                       -                             -\n"
            "   2  0 0 0 1                       -                             -\n"
            "   3  1 0 0 1                       -                             -\n"
            "   4  -                             0 0 0 0                       0 0 0 0\n"
            "   5  -                             0 0 1 0                       0 0 1 0\n");
  // Each with each of the first stage, a pair and direction.
  std::vector<std::string> images;
  for (const GroupSpec& group : plan->groups) {
    if (group.name.find(".images.") == std::string::npos) continue;
    images.push_back(group.name);
    EXPECT_LT(group.ranks[0], 2) << group.name;
    EXPECT_GE(group.ranks[1], 4) << group.name;
  }
  EXPECT_THAT(images, ElementsAre("vision_encoder.images.4>0", "vision_encoder.images.0>4", "vision_encoder.images.4>1",
                                  "vision_encoder.images.1>4", "vision_encoder.images.5>0", "vision_encoder.images.0>5",
                                  "vision_encoder.images.5>1", "vision_encoder.images.1>5"));
}

TEST(MeshPlan, LayoutsThatDoNotFitAreRefused) {
  ParallelSpec spec;
  spec.llm = layout(2, 1, 2, 1);
  spec.vision_encoder = layout(1, 1, 3, 1);
  EXPECT_THAT(plan_mesh(spec, {"vision_encoder"}).status().message(),
              HasSubstr("vision_encoder: dp · tp · pp · sp is 3, but the module covers 4 ranks of llm_backbone"));
  spec.vision_encoder->ranks = 2;
  EXPECT_THAT(plan_mesh(spec, {"vision_encoder"}).status().message(), HasSubstr("covers 2 ranks of its own"));
  spec.vision_encoder->ranks = 3;
  EXPECT_TRUE(plan_mesh(spec, {"vision_encoder"}).ok());
  EXPECT_THAT(plan_mesh(spec, {}).status().message(), HasSubstr("the model has no such module"));
  spec.llm.ep = 3;
  EXPECT_THAT(plan_mesh(spec, {"vision_encoder"}).status().message(), HasSubstr("ep (3) must divide dp · sp (2)"));
}

// Each group sums its ranks' numbers: who is in it, seen from within.
TEST(DeviceMesh, GroupsConnectTheRanksThatThePlanNames) {
  ParallelSpec spec;
  spec.llm = layout(2, 1, 2, 2);
  spec.vision_encoder = layout(1, 1, 2, 1);
  spec.vision_encoder->ranks = 2;
  const MeshPlan plan = *plan_mesh(spec, {"vision_encoder", "projector"});
  run_local_world(plan.world, {}, [&](Communicator& communicator) {
    const auto mesh = DeviceMesh::connect(plan, communicator);
    ASSERT_TRUE(mesh.ok()) << mesh.status();
    for (const GroupSpec& spec : plan.groups) {
      if (std::find(spec.ranks.begin(), spec.ranks.end(), communicator.rank()) == spec.ranks.end()) continue;
      std::string kind = spec.name;
      if (kind.find('[') != std::string::npos) kind.erase(kind.find('['), 3);
      ProcessGroup* group = (*mesh)->group(kind);
      ASSERT_NE(group, nullptr) << kind;
      EXPECT_EQ(group->name(), spec.name);
      double sum = static_cast<double>(int64_t{1} << communicator.rank()), want = 0;
      for (const int64_t rank : spec.ranks) want += static_cast<double>(int64_t{1} << rank);
      ASSERT_TRUE(group->all_reduce({&sum, 1, DType::kFloat64}, ReduceOp::kSum)->wait().ok());
      EXPECT_EQ(sum, want) << spec.name;
    }
    EXPECT_EQ((*mesh)->group("llm_backbone.sp"), nullptr);
    EXPECT_EQ((*mesh)->group("vision_encoder.data") != nullptr, communicator.rank() >= 8);
  });
}

TEST(DeviceMesh, AnotherNumberOfProcessesIsRefused) {
  ParallelSpec spec;
  spec.llm = layout(2, 1, 2, 1);
  run_local_world(3, {}, [&](Communicator& communicator) {
    EXPECT_THAT(DeviceMesh::connect(*plan_mesh(spec, {}), communicator).status().message(),
                HasSubstr("the layout has 4 ranks, but 3 processes were started"));
  });
}

}  // namespace
}  // namespace parvl
