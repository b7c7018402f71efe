// Values, calls and bytes by formula, against published sizes and sums by hand.
#include <gmock/gmock.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "parvl/plan/cost/flops.h"
#include "parvl/plan/cost/traffic.h"
#include "parvl/plan/cost/values.h"
#include "parvl/plan/pipeline/messages.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

ModelSpec qwen2_half_billion() {
  ModelSpec spec;
  spec.family = Family::kQwen2;
  spec.backbone = {24, 896, 14, 2, 64, 4864, 151'936, 32'768};
  spec.backbone.qkv_bias = spec.backbone.tied = true;
  return spec;
}

ModelSpec qwen2_vl_2b() {
  ModelSpec spec;
  spec.family = Family::kQwen2Vl;
  spec.backbone = {28, 1536, 12, 2, 128, 8960, 151'936, 32'768};
  spec.backbone.qkv_bias = spec.backbone.tied = true;
  spec.vision.emplace();
  spec.vision->layers = 32;
  spec.vision->hidden = 1280;
  spec.vision->heads = 16;
  spec.vision->intermediate = 5120;
  return spec;
}

ModelSpec llama_8b() {
  ModelSpec spec;
  spec.backbone = {32, 4096, 32, 8, 128, 14'336, 128'256, 131'072};
  return spec;
}

// As the models' cards count them.
TEST(Values, PublishedSizes) {
  EXPECT_EQ(value_counts(qwen2_half_billion()).total(), 494'032'768);
  EXPECT_EQ(value_counts(llama_8b()).total(), 8'030'261'248);
  const ValueCounts vl = value_counts(qwen2_vl_2b());
  EXPECT_EQ(vl.total(), 2'208'985'600);
  EXPECT_EQ(vl.backbone(), 1'543'714'304);
  EXPECT_EQ(vl.projector, 34'087'936);
}

TEST(Values, StagesAddUpToTheModelAndATiedCopy) {
  for (const ModelSpec& spec : {qwen2_half_billion(), llama_8b()}) {
    const ValueCounts counts = value_counts(spec);
    for (int64_t stages = 1; stages <= 8; ++stages) {
      int64_t sum = 0;
      const std::vector<StagePart> parts = *split_layers(counts.layers, stages);
      for (const StagePart& part : parts) sum += stage_values(counts, part);
      const int64_t copy = spec.backbone.tied && stages > 1 ? counts.embedding : 0;
      EXPECT_EQ(sum, counts.backbone() + copy) << stages;
    }
  }
}

TEST(Values, AlignmentRoundsEachTensorUp) {
  ModelSpec spec;
  spec.backbone = {1, 4, 2, 1, 2, 6, 10, 16};
  // Norms 4 + 4; q 16, k 8, v 8, out 16; gate 24, up 24, down 24; final norm 4; two matrices of 40.
  EXPECT_EQ(value_counts(spec).total(), 8 + 48 + 72 + 4 + 80);
  EXPECT_EQ(value_counts(spec, 64).total(), 12 * 64);
}

TEST(Flops, StagesAddUpToTheModel) {
  const ModelSpec spec = qwen2_vl_2b();
  const BatchShape batch{{100, 37}, {64, 256}, 12};
  for (int64_t stages = 1; stages <= 8; ++stages) {
    double sum = vision_forward_flops(spec, batch.image_patches);
    const std::vector<StagePart> parts = *split_layers(spec.backbone.layers, stages);
    for (const StagePart& part : parts) {
      sum += stage_forward_flops(spec.backbone, part, batch);
    }
    EXPECT_NEAR(sum / forward_flops(spec, batch), 1, 1e-12);
  }
  // A layer on t tokens: twice its matrices' values a token, and causal attention of 2 t² · heads · head size.
  BackboneSpec tiny{1, 4, 2, 1, 2, 6, 10, 16};
  EXPECT_EQ(stage_forward_flops(tiny, {0, 1, true, false}, {{5}, {}, 3}), 2 * 5 * (48 + 72) + 2 * 25 * 4);
  EXPECT_EQ(stage_forward_flops(tiny, {1, 0, false, true}, {{5}, {}, 3}), 2 * 3 * 4 * 10);
}

TEST(Traffic, WhatARingSends) {
  EXPECT_EQ(sent_bytes(TrafficKind::kAllReduce, 1000, 1), 0);
  EXPECT_EQ(sent_bytes(TrafficKind::kAllReduce, 1000, 2), 1000);
  EXPECT_EQ(sent_bytes(TrafficKind::kAllReduce, 1000, 4), 1500);
  EXPECT_EQ(sent_bytes(TrafficKind::kReduceScatter, 1000, 4), 750);
  EXPECT_EQ(sent_bytes(TrafficKind::kAllGather, 1000, 3), 667);
  EXPECT_EQ(sent_bytes(TrafficKind::kSend, 1000, 2), 1000);
}

TEST(Traffic, DataParallel) {
  EXPECT_THAT(data_parallel_traffic({100, 10}, {.ranks = 1}), IsEmpty());
  EXPECT_THAT(data_parallel_traffic({}, {.ranks = 4}), IsEmpty());
  EXPECT_THAT(data_parallel_traffic({100, 10}, {.ranks = 2}),
              ElementsAre(Traffic{TrafficKind::kAllReduce, 2, 440, 440}));
  EXPECT_THAT(data_parallel_traffic({100}, {.ranks = 4, .zero = 0, .master = DType::kFloat64}),
              ElementsAre(Traffic{TrafficKind::kAllReduce, 1, 800, 1200}));
}

TEST(Traffic, ZeroOneGathersInTheForwardsType) {
  // 10 values in 4 parts of 3: 12. Gradients in float32, weights in bfloat16.
  const DataParallel shape{.ranks = 4, .zero = 1, .master = DType::kFloat32, .value = DType::kBFloat16};
  EXPECT_THAT(data_parallel_traffic({10, 4}, shape), ElementsAre(Traffic{TrafficKind::kReduceScatter, 2, 64, 48},
                                                                 Traffic{TrafficKind::kAllGather, 2, 32, 24}));
}

// ZeRO-1 sends what an all-reduce does where nothing is padded and types are one.
RC_GTEST_PROP(Traffic, ZeroOneCostsWhatAnAllReduceDoes, ()) {
  DataParallel shape{.ranks = *rc::gen::inRange(2, 65)};
  const std::vector<int64_t> groups = {*rc::gen::inRange(1, 1000) * shape.ranks};
  const int64_t plain = data_parallel_traffic(groups, shape).at(0).sent;
  shape.zero = 1;
  int64_t sent = 0;
  for (const Traffic& traffic : data_parallel_traffic(groups, shape)) sent += traffic.sent;
  RC_ASSERT(sent == plain);
}

// A layer whose graph is kept moves 8 · rows · hidden, filled up to equal parts; one without, half of that.
TEST(Traffic, ALayerOfTensorRanks) {
  const BackboneSpec b = qwen2_half_billion().backbone;
  const TensorCut cut{.ranks = 4, .value = DType::kBFloat16};
  const auto bytes = [&](const PieceBackward& piece, const TensorCut& how) {
    int64_t out = 0;
    for (const Traffic& traffic : backbone_tensor_traffic(b, {5, 1, false, false}, {piece}, {10, 0, 3}, how)) {
      out += traffic.bytes;
    }
    return out;
  };
  constexpr int64_t kRows = 12 * 896 * 2;
  EXPECT_EQ(bytes({true, true}, cut), 8 * kRows);
  EXPECT_EQ(bytes({false, true}, cut), 8 * kRows);
  EXPECT_EQ(bytes({true, false}, cut), 8 * kRows);
  EXPECT_EQ(bytes({false, false}, cut), 4 * kRows);
  TensorCut again = cut;
  again.recompute = true;
  EXPECT_EQ(bytes({true, true}, again), 12 * kRows);
  EXPECT_EQ(bytes({false, false}, again), 4 * kRows);
  EXPECT_EQ(bytes({true, true}, {.ranks = 1}), 0);
}

// 110 rows of 151,936 words at a time; three numbers of four bytes a row. No logits.
TEST(Traffic, TheLossExchangesThreeNumbersARow) {
  const BackboneSpec b = qwen2_half_billion().backbone;
  EXPECT_EQ(loss_rows_at_once(b.vocab), 110);
  const TensorCut cut{.ranks = 2, .value = DType::kBFloat16};
  const auto traffic = backbone_tensor_traffic(b, {24, 0, false, true}, {{true, true}}, {400, 0, 300}, cut);
  EXPECT_EQ(traffic.at(0), (Traffic{TrafficKind::kAllReduce, 6, 300 * 12, 300 * 12}));
}

PipelineShape shape(int64_t stages, int64_t microbatches) {
  PipelineShape out;
  out.stages = stages;
  out.microbatches.resize(static_cast<size_t>(microbatches));
  return out;
}

// T · H values of two bytes, both ways over p − 1 borders.
TEST(Traffic, Pipeline) {
  const PipelineSchedule schedule = *make_1f1b(shape(3, 4));
  const ModelSpec spec = qwen2_half_billion();
  const auto bytes = [&](int64_t stage, int64_t microbatch) {
    return message_bytes(stage_messages(stage_tensors(spec, stage, DType::kBFloat16), {100, 0}, 1, 0));
  };
  constexpr int64_t kOne = 100 * 896 * 2;
  EXPECT_THAT(pipeline_traffic(schedule, 0, bytes), ElementsAre(PeerTraffic{1, 4, 4 * kOne}));
  EXPECT_THAT(pipeline_traffic(schedule, 1, bytes),
              ElementsAre(PeerTraffic{0, 4, 4 * kOne}, PeerTraffic{2, 4, 4 * kOne}));
  EXPECT_THAT(pipeline_traffic(schedule, 2, bytes), ElementsAre(PeerTraffic{1, 4, 4 * kOne}));
}

TEST(Traffic, FrozenStagesGetNoGradientsAndEncodersSendTheirRows) {
  PipelineShape s = shape(2, 3);
  s.stage_trained = {false, true};
  s.encoder = EncoderPlace::kOwnRanks;
  s.encoder_ranks = 2;
  s.microbatches[0].encoders = {0};
  s.microbatches[2].encoders = {0, 1};
  const PipelineSchedule schedule = *make_1f1b(s);
  const auto bytes = [](int64_t stage, int64_t microbatch) { return stage == kEncoderStage ? 7 : 100 + microbatch; };
  EXPECT_THAT(pipeline_traffic(schedule, 0, bytes), ElementsAre(PeerTraffic{1, 3, 303}));
  EXPECT_THAT(pipeline_traffic(schedule, 1, bytes), IsEmpty());
  EXPECT_THAT(pipeline_traffic(schedule, 2, bytes), ElementsAre(PeerTraffic{0, 2, 14}));
  EXPECT_THAT(pipeline_traffic(schedule, 3, bytes, 2), ElementsAre(PeerTraffic{0, 2, 7}));
}

// Over the tensor-parallel ranks a border carries the same bytes in all, however many there are.
RC_GTEST_PROP(Traffic, TensorParallelRanksShareABorder, ()) {
  const int64_t tokens = *rc::gen::inRange(0, 500), tp = *rc::gen::inRange(1, 17);
  const std::vector<StageTensor> tensors = stage_tensors(qwen2_half_billion(), 0, DType::kFloat32);
  int64_t sum = 0;
  for (int64_t rank = 0; rank < tp; ++rank) sum += message_bytes(stage_messages(tensors, {tokens, 0}, tp, rank));
  RC_ASSERT(sum == tokens * 896 * 4);
}

}  // namespace
}  // namespace parvl
