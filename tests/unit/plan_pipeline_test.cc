// Stages, the freeze plan and the 1F1B schedule as text, against tables worked out by hand.
#include <gmock/gmock.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <numeric>

#include "parvl/plan/pipeline/messages.h"
#include "parvl/plan/pipeline/schedule.h"
#include "parvl/plan/pipeline/schedule_check.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<int64_t> counts(const std::vector<StagePart>& parts) {
  std::vector<int64_t> out;
  for (const StagePart& part : parts) out.push_back(part.layers);
  return out;
}

TEST(Stages, ExtraLayersStandBeforeTheLastStage) {
  EXPECT_THAT(counts(*split_layers(8, 4)), ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(counts(*split_layers(9, 4)), ElementsAre(2, 2, 3, 2));
  EXPECT_THAT(counts(*split_layers(11, 4)), ElementsAre(3, 3, 3, 2));
  EXPECT_THAT(counts(*split_layers(7, 1)), ElementsAre(7));
  EXPECT_THAT(counts(*split_layers(3, 2)), ElementsAre(2, 1));
  EXPECT_THAT(*split_layers(5, 2, {1, 4}), ElementsAre(StagePart{0, 1, true, false}, StagePart{1, 4, false, true}));
  EXPECT_THAT(*split_layers(2, 1), ElementsAre(StagePart{0, 2, true, true}));
}

TEST(Stages, TheFirstAndTheLastMayHaveNoLayer) {
  EXPECT_THAT(*split_layers(4, 3, {0, 4, 0}),
              ElementsAre(StagePart{0, 0, true, false}, StagePart{0, 4, false, false}, StagePart{4, 0, false, true}));
}

TEST(Stages, WhatIsRefused) {
  const auto refusal = [](int64_t layers, int64_t stages, const std::vector<int64_t>& given) {
    const absl::Status status = split_layers(layers, stages, given).status();
    EXPECT_EQ(exit_code(status), 2);
    return std::string(status.message());
  };
  EXPECT_THAT(refusal(2, 3, {}), HasSubstr("pp = 3 is more stages than the model's 2 layers"));
  EXPECT_THAT(refusal(4, 3, {2, 2}), HasSubstr("stages: [2, 2] lists 2 stages, but there are 3"));
  EXPECT_THAT(refusal(4, 3, {2, 0, 2}), HasSubstr("gives stage 1 0 layers; a stage needs one at least unless"));
  EXPECT_THAT(refusal(4, 2, {5, -1}), HasSubstr("gives stage 1 -1 layers"));
  EXPECT_THAT(refusal(5, 2, {2, 2}), HasSubstr("has 4 layers together, but the model has 5"));
  EXPECT_THAT(refusal(5, 0, {}), HasSubstr("one stage at least"));
}

RC_GTEST_PROP(Stages, EveryLayerIsOnOneStageAndNoneHasTwoMoreThanAnother, ()) {
  const int64_t stages = *rc::gen::inRange(1, 17), layers = *rc::gen::inRange<int64_t>(stages, 100);
  const std::vector<StagePart> parts = *split_layers(layers, stages);
  int64_t next = 0, least = layers, most = 0;
  for (const StagePart& part : parts) {
    RC_ASSERT(part.first_layer == next);
    RC_ASSERT(part.embedding == (&part == &parts.front()));
    RC_ASSERT(part.head == (&part == &parts.back()));
    next += part.layers;
    least = std::min(least, part.layers);
    most = std::max(most, part.layers);
  }
  RC_ASSERT(next == layers);
  RC_ASSERT(most - least <= 1);
  RC_ASSERT(parts.back().layers == least);
}

TEST(FreezePlan, GraphsBeginAtTheFirstTrainedPiece) {
  const PieceBackward none{}, first{false, true}, through{true, false}, both{true, true};
  EXPECT_THAT(plan_backward({true, true, true, true}), ElementsAre(first, both, both, both));
  EXPECT_THAT(plan_backward({false, true, true, true}), ElementsAre(none, first, both, both));  // encoder frozen
  EXPECT_THAT(plan_backward({false, true, false, false}),
              ElementsAre(none, first, through, through));                                        // projector only
  EXPECT_THAT(plan_backward({false, false, false, true}), ElementsAre(none, none, none, first));  // the last stage
  EXPECT_THAT(plan_backward({true, false, false, true}), ElementsAre(first, through, through, both));
  EXPECT_THAT(plan_backward({false, false}), ElementsAre(none, none));
  EXPECT_FALSE(none.keeps_graph());
  EXPECT_TRUE(through.keeps_graph());
}

// A piece that sends its gradient upstream has a neighbour there that keeps a graph for it, and the other way round.
RC_GTEST_PROP(FreezePlan, EveryGradientThatIsSentIsWanted, (const std::vector<bool>& trained)) {
  const std::vector<PieceBackward> plan = plan_backward(trained);
  for (size_t i = 0; i + 1 < plan.size(); ++i) RC_ASSERT(plan[i + 1].input_grad == plan[i].keeps_graph());
}

PipelineShape shape(int64_t stages, int64_t microbatches) {
  PipelineShape out;
  out.stages = stages;
  out.microbatches.resize(static_cast<size_t>(microbatches));
  return out;
}

std::string text(const PipelineShape& shape) {
  const absl::StatusOr<PipelineSchedule> schedule = make_1f1b(shape);
  EXPECT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(check_schedule(*schedule), absl::OkStatus());
  return to_text(*schedule);
}

// The bounds are reached: min(micro batches, stages − stage).
TEST(OneForwardOneBackward, AStageHoldsAsManyMicrobatchesAsAreBelowIt) {
  for (int64_t stages = 1; stages <= 5; ++stages) {
    for (int64_t microbatches = 1; microbatches <= 7; ++microbatches) {
      const PipelineSchedule schedule = *make_1f1b(shape(stages, microbatches));
      for (const RankSchedule& rank : schedule.ranks) {
        int64_t live = 0, most = 0;
        for (const Action& action : rank.actions) {
          if (action.kind == ActionKind::kForward) most = std::max(most, ++live);
          if (action.kind == ActionKind::kRelease) --live;
        }
        EXPECT_EQ(most, std::min(microbatches, stages - rank.stage));
        EXPECT_EQ(most, rank.max_live);
        EXPECT_EQ(live, 0);
      }
    }
  }
}

TEST(OneForwardOneBackward, OneStageTakesTurns) { EXPECT_EQ(text(shape(1, 2)), "0: F0 B0 -0 F1 B1 -1\n"); }

TEST(OneForwardOneBackward, TwoStages) {
  EXPECT_EQ(text(shape(2, 3)),
            "0: F0 o0>1 F1 o1>1 g0<1 B0 -0 F2 o2>1 g1<1 B1 -1 g2<1 B2 -2\n"
            "1: o0<0 F0 B0 -0 o1<0 g0>0 F1 B1 -1 o2<0 g1>0 F2 B2 -2 g2>0\n");
}

TEST(OneForwardOneBackward, FewerMicrobatchesThanStages) {
  EXPECT_EQ(text(shape(3, 1)),
            "0: F0 o0>1 g0<1 B0 -0\n"
            "1: o0<0 F0 o0>2 g0<2 B0 -0 g0>0\n"
            "2: o0<1 F0 B0 -0 g0>1\n");
}

TEST(OneForwardOneBackward, FrozenStagesKeepNothingAndNobodySendsThemGradients) {
  PipelineShape s = shape(3, 2);
  s.stage_trained = {false, true, true};
  EXPECT_EQ(text(s),
            "0: F0 o0>1 -0 F1 o1>1 -1\n"
            "1: o0<0 F0 o0>2 o1<0 F1 o1>2 g0<2 B0 -0 g1<2 B1 -1\n"
            "2: o0<1 F0 B0 -0 o1<1 g0>1 F1 B1 -1 g1>1\n");
}

TEST(OneForwardOneBackward, TheTiedGradientIsSummedAtTheEnd) {
  PipelineShape s = shape(3, 1);
  s.tied = true;
  EXPECT_EQ(text(s),
            "0: F0 o0>1 g0<1 B0 -0 T\n"
            "1: o0<0 F0 o0>2 g0<2 B0 -0 g0>0\n"
            "2: o0<1 F0 B0 -0 g0>1 T\n");
}

TEST(OneForwardOneBackward, AnEncoderOnItsOwnRanksIsOneMoreStage) {
  PipelineShape s = shape(1, 3);
  s.encoder = EncoderPlace::kOwnRanks;
  s.encoder_ranks = 2;
  s.encoder_trained = true;
  s.microbatches[0].encoders = {0};
  s.microbatches[1].encoders = {};
  s.microbatches[2].encoders = {0, 1};
  EXPECT_EQ(text(s),
            "0: o0<1 F0 B0 -0 g0>1 F1 B1 -1 o2<1 o2<2 F2 B2 -2 g2>1 g2>2\n"
            "1: FE0 o0>0 g0<0 BE0 -E0 FE2 o2>0 g2<0 BE2 -E2\n"
            "2: FE2 o2>0 g2<0 BE2 -E2\n");
  s.encoder_trained = false;
  EXPECT_EQ(text(s),
            "0: o0<1 F0 B0 -0 F1 B1 -1 o2<1 o2<2 F2 B2 -2\n"
            "1: FE0 o0>0 -E0 FE2 o2>0 -E2\n"
            "2: FE2 o2>0 -E2\n");
}

// One micro batch a replica and turn.
TEST(OneForwardOneBackward, AnEncoderServesTheReplicasInTurn) {
  PipelineShape s = shape(1, 4);
  s.replicas = 2;
  s.encoder = EncoderPlace::kOwnRanks;
  s.encoder_ranks = 1;
  s.encoder_trained = true;
  for (size_t i = 0; i < 4; ++i) s.microbatches[i] = {static_cast<int64_t>(i % 2), {0}};
  EXPECT_EQ(text(s),
            "0: o0<2 F0 B0 -0 o2<2 g0>2 F2 B2 -2 g2>2\n"
            "1: o1<2 F1 B1 -1 o3<2 g1>2 F3 B3 -3 g3>2\n"
            "2: FE0 o0>0 FE1 o1>1 FE2 o2>0 g0<0 BE0 -E0 FE3 o3>1 g1<1 BE1 -E1 g2<0 BE2 -E2 g3<1 BE3 -E3\n");
}

TEST(OneForwardOneBackward, AnEncoderOverAllRanksIsDoneBeforeAndGoesBackAfter) {
  PipelineShape s = shape(2, 3);
  s.encoder = EncoderPlace::kAllRanks;
  s.encoder_trained = true;
  s.microbatches[0].encoders = {0, 1};
  s.microbatches[2].encoders = {1};
  EXPECT_EQ(text(s),
            "0: FE0 o0x o2x F0 o0>1 F1 o1>1 g0<1 B0 -0 F2 o2>1 g1<1 B1 -1 g2<1 B2 -2 g0x g2x BE0 -E0\n"
            "1: FE0 FE2 o0x o2x o0<0 F0 B0 -0 o1<0 g0>0 F1 B1 -1 o2<0 g1>0 F2 B2 -2 g2>0 g0x g2x BE0 -E0 BE2 -E2\n");
}

// The projector alone is trained, beside the encoder: text goes through without a graph.
TEST(OneForwardOneBackward, AMicrobatchWithoutImagesHasNoGradientForTheEncoder) {
  PipelineShape s = shape(2, 2);
  s.encoder = EncoderPlace::kAllRanks;
  s.encoder_trained = true;
  s.stage_trained = {false, false};
  s.microbatches[1].encoders = {0};
  EXPECT_EQ(text(s),
            "0: FE1 o1x F0 o0>1 -0 F1 o1>1 g1<1 B1 -1 g1x BE1 -E1\n"
            "1: o1x o0<0 F0 -0 o1<0 F1 B1 -1 g1>0 g1x\n");
}

TEST(OneForwardOneBackward, ShapesThatAreNoneAreRefused) {
  const auto refusal = [](const PipelineShape& s) { return std::string(make_1f1b(s).status().message()); };
  PipelineShape s = shape(2, 1);
  s.microbatches[0].encoders = {0};
  EXPECT_THAT(refusal(s), HasSubstr("lie on encoder rank 0; there are 0"));
  s.encoder = EncoderPlace::kAllRanks;
  EXPECT_TRUE(make_1f1b(s).ok());
  s.microbatches[0].encoders = {1, 1};
  EXPECT_THAT(refusal(s), HasSubstr("each named once"));
  s.microbatches[0] = {1, {}};
  EXPECT_THAT(refusal(s), HasSubstr("a micro batch of replica 1; there are 1"));
  s = shape(2, 1);
  s.stage_trained = {true};
  EXPECT_THAT(refusal(s), HasSubstr("the freeze plan has 1 stages; the pipeline has 2"));
  s.stage_trained = {false, true};
  s.tied = true;
  EXPECT_THAT(refusal(s), HasSubstr("tied embedding"));
  s = shape(0, 1);
  EXPECT_THAT(refusal(s), HasSubstr("a stage and a replica at least"));
  s = shape(1, 1);
  s.encoder = EncoderPlace::kOwnRanks;
  EXPECT_THAT(refusal(s), HasSubstr("needs a rank"));
}

TEST(StageMessages, RowsInChunks) {
  const auto chunks = [](int64_t rows, int64_t parts) {
    std::vector<int64_t> out;
    for (int64_t part = 0; part < parts; ++part) out.push_back(row_chunk(rows, parts, part).count);
    return out;
  };
  EXPECT_THAT(chunks(8, 4), ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(chunks(7, 4), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(chunks(5, 4), ElementsAre(2, 2, 1, 0));
  EXPECT_THAT(chunks(1, 3), ElementsAre(1, 0, 0));
  EXPECT_THAT(chunks(0, 2), ElementsAre(0, 0));
  EXPECT_EQ(row_chunk(7, 4, 3), (RowRange{6, 1}));
  EXPECT_EQ(row_chunk(5, 4, 3), (RowRange{5, 0}));
}

RC_GTEST_PROP(StageMessages, ChunksCoverTheRowsInOrder, ()) {
  const int64_t rows = *rc::gen::inRange(0, 1000), parts = *rc::gen::inRange(1, 65);
  int64_t next = 0;
  for (int64_t part = 0; part < parts; ++part) {
    const RowRange range = row_chunk(rows, parts, part);
    RC_ASSERT(range.begin == next);
    RC_ASSERT(range.count >= 0);
    RC_ASSERT(range.count <= (rows + parts - 1) / parts);
    next += range.count;
  }
  RC_ASSERT(next == rows);
}

TEST(StageMessages, HiddenRowsAreCutAndVisualRowsAreNot) {
  ModelSpec spec;
  spec.backbone.hidden = 896;
  const MicrobatchRows rows{101, 64};
  const auto hidden = stage_tensors(spec, 0, DType::kBFloat16);
  EXPECT_THAT(stage_messages(hidden, rows, 1, 0), ElementsAre(StageMessage{"hidden", 101, 896, DType::kBFloat16}));
  EXPECT_THAT(stage_messages(hidden, rows, 2, 0), ElementsAre(StageMessage{"hidden", 51, 896, DType::kBFloat16}));
  EXPECT_THAT(stage_messages(hidden, rows, 2, 1), ElementsAre(StageMessage{"hidden", 50, 896, DType::kBFloat16}));
  EXPECT_EQ(message_bytes(stage_messages(hidden, rows, 2, 1)), 50 * 896 * 2);
  EXPECT_THAT(stage_messages(stage_tensors(spec, kEncoderStage, DType::kFloat32), rows, 2, 1),
              ElementsAre(StageMessage{"visual", 64, 896, DType::kFloat32}));
}

// Features that enter at later layers travel beside the hidden rows.
TEST(StageMessages, ABundleMayHoldMore) {
  const std::vector<StageTensor> bundle = {{"hidden", StageTensor::Rows::kTokens, 8, DType::kFloat32, true},
                                           {"deepstack.0", StageTensor::Rows::kVisual, 8, DType::kFloat32, true},
                                           {"deepstack.1", StageTensor::Rows::kVisual, 16, DType::kFloat64, false}};
  const std::vector<StageMessage> messages = stage_messages(bundle, {10, 5}, 4, 3);
  EXPECT_THAT(messages, ElementsAre(StageMessage{"hidden", 1, 8, DType::kFloat32},
                                    StageMessage{"deepstack.0", 0, 8, DType::kFloat32},
                                    StageMessage{"deepstack.1", 5, 16, DType::kFloat64}));
  EXPECT_EQ(message_bytes(messages), 8 * 4 + 5 * 16 * 8);
}

}  // namespace
}  // namespace parvl
