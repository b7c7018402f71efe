// What a layout's ranks say to each other in a step, as --dry-run tells it.
#include <gmock/gmock.h>

#include "parvl/plan/cost/values.h"
#include "parvl/train/layout_report.h"

namespace parvl {
namespace {

// Two layers of 8 wide; matrices of 16 words tied. Float32.
ModelSpec tiny() {
  ModelSpec spec;
  spec.backbone = {2, 8, 2, 1, 4, 16, 16, 64};
  spec.backbone.tied = true;
  return spec;
}

ModelSpec tiny_vision() {
  ModelSpec spec = tiny();
  spec.family = Family::kQwen2Vl;
  spec.vision.emplace();
  spec.vision->layers = 1;
  spec.vision->hidden = 8;
  spec.vision->heads = 2;
  spec.vision->intermediate = 16;
  return spec;
}

struct Case {
  MeshPlan plan;
  LayoutStep step;
};

Case make_case(const ModelSpec& model, const ParallelSpec& parallel) {
  Case out;
  const std::vector<std::string> modules = {"vision_encoder", "projector"};
  out.plan = *plan_mesh(parallel, model.vision ? modules : std::vector<std::string>());
  out.step.model = model;
  out.step.parallel = parallel;
  out.step.microbatches = 3;
  out.step.tokens = 10;
  return out;
}

std::vector<GroupTraffic> traffic(Case& c) {
  if (!c.step.trained) {
    c.step.trained = [&c](const std::string& module, int64_t rank) {
      return values_without_tp(c.plan, c.step, module, rank);
    };
  }
  return step_traffic(c.plan, c.step);
}

std::string lines(const std::vector<GroupTraffic>& rows) {
  std::string out;
  for (const GroupTraffic& row : rows) {
    absl::StrAppend(&out, row.group, " ", row.ranks[0], row.traffic.call == CallKind::kSend ? ">" : "-",
                    row.ranks.back(), " ", to_string(row.traffic.call), " ", row.traffic.calls, " ", row.traffic.bytes,
                    " ", row.traffic.sent, "\n");
  }
  return out;
}

// A layer: norms 16, attention 64 + 32 + 32 + 64, MLP 3 · 128 = 592; embedding 128, final norm 8.
TEST(LayoutReport, DataParallelReducesGradientsOnce) {
  ParallelSpec parallel;
  parallel.llm.dp = 2;
  Case c = make_case(tiny(), parallel);
  ASSERT_EQ(value_counts(c.step.model).total(), 2 * 592 + 128 + 8);
  EXPECT_EQ(lines(traffic(c)), "llm_backbone.data[0] 0-1 all_reduce 1 5280 5280\n");
  c.step.parallel.zero = 1;
  EXPECT_EQ(lines(traffic(c)),
            "llm_backbone.data[0] 0-1 all_reduce 1 8 8\n"
            "llm_backbone.data[0] 0-1 reduce_scatter 1 5280 2640\n"
            "llm_backbone.data[0] 0-1 all_gather 1 5280 2640\n");
}

// Ranks 0 and 1 the first stage, 2 and 3 the second: 10 tokens of 8 float32 a message, three each way.
TEST(LayoutReport, PipelinesSendHiddenRowsAndSumTheTiedEmbedding) {
  ParallelSpec parallel;
  parallel.llm.dp = parallel.llm.pp = 2;
  Case c = make_case(tiny(), parallel);
  c.step.tied_values = 128;
  EXPECT_EQ(lines(traffic(c)),
            "llm_backbone.data[0] 0-1 all_reduce 1 2880 2880\n"
            "llm_backbone.data[1] 2-3 all_reduce 1 2912 2912\n"
            "llm_backbone.pp[0].0>1 0>2 send 3 960 960\n"
            "llm_backbone.pp[0].1>0 2>0 send 3 960 960\n"
            "llm_backbone.tied[0] 0-2 all_reduce 1 512 512\n"
            "llm_backbone.pp[1].0>1 1>3 send 3 960 960\n"
            "llm_backbone.pp[1].1>0 3>1 send 3 960 960\n"
            "llm_backbone.tied[1] 1-3 all_reduce 1 512 512\n");
}

TEST(LayoutReport, TensorParallelRanksSendTheirRowsAlone) {
  ParallelSpec parallel;
  parallel.llm.tp = 4;
  parallel.llm.pp = 2;
  Case c = make_case(tiny(), parallel);
  c.step.trained = [](const std::string&, int64_t) { return std::vector<int64_t>{100}; };
  // 10 rows in chunks of 3: 3, 3, 3, 1.
  EXPECT_EQ(lines(traffic(c)),
            "llm_backbone.pp[0].0>1 0>4 send 3 288 288\n"
            "llm_backbone.pp[0].1>0 4>0 send 3 288 288\n"
            "llm_backbone.pp[1].0>1 1>5 send 3 288 288\n"
            "llm_backbone.pp[1].1>0 5>1 send 3 288 288\n"
            "llm_backbone.pp[2].0>1 2>6 send 3 288 288\n"
            "llm_backbone.pp[2].1>0 6>2 send 3 288 288\n"
            "llm_backbone.pp[3].0>1 3>7 send 3 96 96\n"
            "llm_backbone.pp[3].1>0 7>3 send 3 96 96\n");
}

TEST(LayoutReport, FrozenModulesAreSilent) {
  ParallelSpec parallel;
  parallel.llm.pp = 2;
  Case c = make_case(tiny_vision(), parallel);
  const auto only = [&](const std::string& trained) {
    c.step.trained = [&c, trained](const std::string& module, int64_t rank) {
      return module == trained ? values_without_tp(c.plan, c.step, module, rank) : std::vector<int64_t>();
    };
    return lines(traffic(c));
  };
  const std::string forward = "llm_backbone.pp[0].0>1 0>1 send 3 960 960\n",
                    back = "llm_backbone.pp[0].1>0 1>0 send 3 960 960\n";
  const int64_t projector = value_counts(c.step.model).projector * 4;
  // The projector before the first stage needs the LLM's gradients, though the LLM is frozen.
  EXPECT_EQ(only("projector"),
            absl::StrCat(forward, back, "projector.data[0] 0-1 all_reduce 1 ", projector, " ", projector, "\n"));
  EXPECT_EQ(only("nothing"), forward);
  // The last stage alone.
  c.step.trained = [](const std::string& module, int64_t rank) {
    return module == "llm_backbone" && rank == 1 ? std::vector<int64_t>{5} : std::vector<int64_t>();
  };
  EXPECT_EQ(lines(traffic(c)), forward);
}

TEST(LayoutReport, ATableForPeople) {
  EXPECT_EQ(traffic_table({{"llm_backbone.data[0]", {0, 1}, {CallKind::kAllReduce, 2, 3 << 20, 3 << 20}},
                           {"llm_backbone.pp[0].1>0", {2, 0}, {CallKind::kSend, 8, 1 << 20, 1 << 20}}}),
            "group                         ranks             call            calls         bytes          sent\n"
            "llm_backbone.data[0]          0 1               all_reduce          2       3.0 MiB       3.0 MiB\n"
            "llm_backbone.pp[0].1>0        2 > 0             send                8       1.0 MiB       1.0 MiB\n"
            "all ranks together send 7.0 MiB a step\n");
}

}  // namespace
}  // namespace parvl
