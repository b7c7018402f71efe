// What a layout's ranks hold and say to each other in a step, as --dry-run tells it.
#include <gmock/gmock.h>

#include "parvl/train/dry_run.h"

namespace parvl {
namespace {

// Two layers of 8 wide; matrices of 16 words tied.
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

Recipe recipe_of(const ParallelSpec& parallel) {
  Recipe out;
  out.parallel = parallel;
  out.data.micro_batch = 1;
  out.data.global_batch = 3 * parallel.llm.dp;
  return out;
}

// Three micro batches of 10 tokens, 4 of them to learn, in float32.
std::vector<GroupTraffic> traffic(const ModelSpec& model, const Recipe& recipe) {
  const auto layout = Layout::create(model, recipe);
  EXPECT_TRUE(layout.ok()) << layout.status();
  StepMicrobatch one{10, 4, {}};
  if (model.vision) {
    one.patches.assign(static_cast<size_t>(layout->encoding_ranks() / layout->cut("vision_encoder").ranks), 0);
    one.patches[0] = 16;
  }
  const StepMicrobatches all(static_cast<size_t>(recipe.parallel.llm.dp), std::vector<StepMicrobatch>(3, one));
  const auto rows = step_traffic(*layout, all);
  EXPECT_TRUE(rows.ok()) << rows.status();
  return *rows;
}

// Without the numbers that all ranks add up.
std::string lines(const std::vector<GroupTraffic>& rows) {
  std::string out;
  for (const GroupTraffic& row : rows) {
    if (row.group == "world") continue;
    absl::StrAppend(&out, row.group, " ", row.ranks[0], row.traffic.call == TrafficKind::kSend ? ">" : "-",
                    row.ranks.back(), " ", to_string(row.traffic.call), " ", row.traffic.calls, " ", row.traffic.bytes,
                    " ", row.traffic.sent, "\n");
  }
  return out;
}

// A layer: norms 16, attention 64 + 32 + 32 + 64, MLP 3 · 128 = 592; embedding 128, final norm 8.
TEST(LayoutReport, DataParallelReducesGradientsOnce) {
  ParallelSpec parallel;
  parallel.llm.dp = 2;
  Recipe recipe = recipe_of(parallel);
  ASSERT_EQ(value_counts(tiny()).total(), 2 * 592 + 128 + 8);
  EXPECT_EQ(lines(traffic(tiny(), recipe)), "llm_backbone.data[0] 0-1 all_reduce 1 5280 5280\n");
  recipe.parallel.zero = 1;
  EXPECT_EQ(lines(traffic(tiny(), recipe)),
            "llm_backbone.data[0] 0-1 reduce_scatter 1 5280 2640\n"
            "llm_backbone.data[0] 0-1 all_gather 1 5280 2640\n");
  // Norms have no weight decay: a flat tensor of their own, 5 · 8.
  recipe.optim.weight_decay = 0.1;
  recipe.parallel.zero = 0;
  EXPECT_EQ(lines(traffic(tiny(), recipe)), "llm_backbone.data[0] 0-1 all_reduce 2 5280 5280\n");
}

// Ranks 0 and 1 the first stage, 2 and 3 the second: 10 tokens of 8 float32 a message, three each way. The
// embedding, on both, is a flat tensor of its own.
TEST(LayoutReport, PipelinesSendHiddenRowsAndSumTheTiedEmbedding) {
  ParallelSpec parallel;
  parallel.llm.dp = parallel.llm.pp = 2;
  EXPECT_EQ(lines(traffic(tiny(), recipe_of(parallel))),
            "llm_backbone.data[0] 0-1 all_reduce 2 2880 2880\n"
            "llm_backbone.data[1] 2-3 all_reduce 2 2912 2912\n"
            "llm_backbone.pp[0].0>1 0>2 send 3 960 960\n"
            "llm_backbone.pp[0].1>0 2>0 send 3 960 960\n"
            "llm_backbone.tied[0] 0-2 all_reduce 1 512 512\n"
            "llm_backbone.pp[1].0>1 1>3 send 3 960 960\n"
            "llm_backbone.pp[1].1>0 3>1 send 3 960 960\n"
            "llm_backbone.tied[1] 1-3 all_reduce 1 512 512\n");
}

// Per micro batch: 10 rows of 8, the embedding one, two layers four gathers and four sums each, the loss a gather and
// its sum; maxima of 4 rows, then two sums a row. Norms, 5 · 8, and the one key head, 2 · 2 · 32, are summed.
TEST(LayoutReport, TensorParallelRanksExchangeRowsAndSumWhatTheyShare) {
  ParallelSpec parallel;
  parallel.llm.tp = 2;
  Recipe recipe = recipe_of(parallel);
  EXPECT_EQ(lines(traffic(tiny(), recipe)),
            absl::StrCat("llm_backbone.tp[0] 0-1 all_reduce 8 ", 3 * 48 + 160 + 512, " ", 3 * 48 + 160 + 512,
                         "\nllm_backbone.tp[0] 0-1 reduce_scatter 30 ", 30 * 320, " ", 15 * 320,
                         "\nllm_backbone.tp[0] 0-1 all_gather 30 ", 30 * 320, " ", 15 * 320, "\n"));
  // The forward's again.
  recipe.train.recompute = "full";
  EXPECT_EQ(lines(traffic(tiny(), recipe)),
            absl::StrCat("llm_backbone.tp[0] 0-1 all_reduce 14 ", 6 * 48 + 160 + 512, " ", 6 * 48 + 160 + 512,
                         "\nllm_backbone.tp[0] 0-1 reduce_scatter 45 ", 45 * 320, " ", 45 * 160,
                         "\nllm_backbone.tp[0] 0-1 all_gather 45 ", 45 * 320, " ", 45 * 160, "\n"));
}

TEST(LayoutReport, TensorParallelStagesSendTheirRowsAlone) {
  ParallelSpec parallel;
  parallel.llm.tp = 2;
  parallel.llm.pp = 2;
  std::string sends;
  ModelSpec model = tiny();
  model.backbone.heads = 4;
  model.backbone.tied = false;
  parallel.llm.tp = 4;
  for (const GroupTraffic& row : traffic(model, recipe_of(parallel))) {
    if (row.traffic.call == TrafficKind::kSend) sends += lines({row});
  }
  // 10 rows in chunks of 3: 3, 3, 3, 1.
  EXPECT_EQ(sends,
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
  Recipe recipe = recipe_of(parallel);
  const std::string forward = "llm_backbone.pp[0].0>1 0>1 send 3 960 960\n",
                    back = "llm_backbone.pp[0].1>0 1>0 send 3 960 960\n";
  // Four merged rows on rank 0 to both.
  const std::string images = "llm_backbone.model[0] 0-1 all_gather 3 768 384\n";
  const std::string image_grads = "llm_backbone.model[0] 0-1 reduce_scatter 3 768 384\n";
  const int64_t projector = value_counts(tiny_vision()).projector * 4;
  // The projector before the first stage needs the LLM's gradients, though the LLM is frozen.
  recipe.train.freeze = {"vision_encoder.*", "llm_backbone.*"};
  EXPECT_EQ(lines(traffic(tiny_vision(), recipe)),
            absl::StrCat(image_grads, images, forward, back, "projector.data[0] 0-1 all_reduce 1 ", projector, " ",
                         projector, "\n"));
  // The last stage alone.
  recipe.train.freeze = {"vision_encoder.*", "projector.*", "llm_backbone.embed.*", "llm_backbone.layers.0.*"};
  EXPECT_EQ(lines(traffic(tiny_vision(), recipe)), images + forward);
}

// The second group of an encoder's own ranks encodes nothing here; of the first each rank has two of four merged rows
// for both tensor ranks, and gets gradients of them from both.
TEST(LayoutReport, AnEncoderApartSendsRowsToTheFirstStage) {
  ParallelSpec parallel;
  parallel.llm.tp = 2;
  parallel.vision_encoder = ModuleLayout{.dp = 2, .tp = 2, .ranks = 4};
  Recipe recipe = recipe_of(parallel);
  recipe.train.freeze = {"llm_backbone.*", "vision_encoder.*"};
  const auto images = [&] {
    std::vector<std::string> out;
    for (const GroupTraffic& row : traffic(tiny_vision(), recipe)) {
      if (row.group.find(".images.") != std::string::npos) out.push_back(lines({row}));
    }
    return out;
  };
  std::vector<std::string> want;
  for (const int encoder : {2, 3}) {
    for (const int llm : {0, 1}) {
      for (const auto& [from, to] : {std::pair(encoder, llm), std::pair(llm, encoder)}) {
        want.push_back(absl::StrCat("vision_encoder.images.", from, ">", to, " ", from, ">", to, " send 3 192 192\n"));
      }
    }
  }
  EXPECT_EQ(images(), want);
  // What is frozen gets nothing back.
  recipe.train.freeze = {"vision_encoder.*", "projector.*"};
  EXPECT_EQ(images().size(), 4);
}

TEST(LayoutReport, ATableForPeople) {
  EXPECT_EQ(traffic_table({{"llm_backbone.data[0]", {0, 1}, {TrafficKind::kAllReduce, 2, 3 << 20, 3 << 20}},
                           {"llm_backbone.pp[0].1>0", {2, 0}, {TrafficKind::kSend, 8, 1 << 20, 1 << 20}}}),
            "group                         ranks             call            calls         bytes          sent\n"
            "llm_backbone.data[0]          0 1               all_reduce          2       3.0 MiB       3.0 MiB\n"
            "llm_backbone.pp[0].1>0        2 > 0             send                8       1.0 MiB       1.0 MiB\n"
            "all ranks together send 7.0 MiB a step\n");
}

// Weights, gradients, moments and masters: 1320 values, of which two ranks share the state.
TEST(Layout, BytesOfZeroOne) {
  ParallelSpec parallel;
  parallel.llm.dp = 2;
  Recipe recipe = recipe_of(parallel);
  const StepMicrobatches microbatches(2, {{10, 4, {}}});
  const auto bytes = [&] { return *Layout::create(tiny(), recipe)->bytes(1, microbatches); };
  EXPECT_EQ(bytes().weights, 1320 * 4);
  EXPECT_EQ(bytes().gradients, 1320 * 4);
  EXPECT_EQ(bytes().optimizer, 2 * 1320 * 4);
  recipe.train.dtype = "bfloat16";
  EXPECT_EQ(bytes().weights, 1320 * 2);
  EXPECT_EQ(bytes().gradients, 1320 * 4);
  EXPECT_EQ(bytes().optimizer, 3 * 1320 * 4);
  recipe.parallel.zero = 1;
  EXPECT_EQ(bytes().weights, 1320 * 2);
  EXPECT_EQ(bytes().optimizer, 3 * 660 * 4);
  recipe.train.freeze = {"llm_backbone.layers.*"};
  EXPECT_EQ(bytes().weights, 1320 * 2);
  EXPECT_EQ(bytes().gradients, 136 * 4);
  EXPECT_EQ(bytes().optimizer, 3 * 68 * 4);
}

TEST(Layout, EarlierStagesHoldMoreMicroBatches) {
  ParallelSpec parallel;
  parallel.llm.pp = 2;
  Recipe recipe = recipe_of(parallel);
  const StepMicrobatches microbatches(1, std::vector<StepMicrobatch>(3, {100, 40, {}}));
  const auto activations = [&](int64_t rank) {
    return Layout::create(tiny(), recipe)->bytes(rank, microbatches)->activations;
  };
  const int64_t layer = layer_activations(tiny().backbone, 100, {1, DType::kFloat32, false});
  const int64_t beside = 100 * (8 + 4 * 4) + 100 * 8 * 4;  // angles and the output
  EXPECT_EQ(activations(0), 2 * (layer + beside));
  EXPECT_EQ(activations(1), layer + beside + 40 * (2 * 8 + 16) * 4);
  recipe.train.recompute = "full";
  EXPECT_EQ(activations(0), 2 * (100 * 8 * 4 + beside) + layer);
}

// As training refuses them.
TEST(Layout, Refusals) {
  ParallelSpec parallel;
  const auto message = [&](const std::vector<std::string>& freeze = {}) {
    Recipe recipe = recipe_of(parallel);
    recipe.train.freeze = freeze;
    return std::string(Layout::create(tiny(), recipe).status().message());
  };
  parallel.llm.tp = 3;
  EXPECT_THAT(message(), testing::HasSubstr("parallel: llm_backbone: tp = 3 does not divide the 2 parts that "
                                            "llm_backbone.layers.0.attn.q.weight has"));
  parallel.llm = {.pp = 3};
  EXPECT_THAT(message(), testing::HasSubstr("pp = 3 is more stages than the model's 2 layers"));
  parallel.llm = {};
  parallel.vision_encoder = ModuleLayout{};
  EXPECT_THAT(message(), testing::HasSubstr("vision_encoder has a layout, but the model has no such module"));
  parallel.vision_encoder = std::nullopt;
  EXPECT_EQ(message({"llm_backbone.embed.*"}), "");
  EXPECT_EQ(message({"llm_backbone.head.weight"}), "");  // the embedding by its other name
  EXPECT_THAT(message({"head"}), testing::HasSubstr("train.freeze pattern 'head' matches no parameter"));
  EXPECT_EQ(message({"*"}), "train.freeze leaves no parameter to train");
}

TEST(Layout, AnEncodersOwnRanksHoldItAloneAndMicroBatchesOfAllReplicas) {
  ParallelSpec parallel;
  parallel.llm.dp = 2;
  parallel.vision_encoder = ModuleLayout{.dp = 1, .ranks = 1};
  const Recipe recipe = recipe_of(parallel);
  const Layout layout = *Layout::create(tiny_vision(), recipe);
  const StepMicrobatches all(2, std::vector<StepMicrobatch>(3, {10, 4, {16}}));
  const ValueCounts values = value_counts(tiny_vision());
  EXPECT_EQ(layout.bytes(0, all)->weights, values.backbone() * 4);
  EXPECT_EQ(layout.bytes(2, all)->weights, (values.vision_encoder + values.projector) * 4);
  const int64_t one = vision_activations(tiny_vision(), {16, 4, 0}, {1, DType::kFloat32}, {1, DType::kFloat32});
  EXPECT_EQ(layout.bytes(2, all)->activations, 3 * one);  // one ahead of each replica's, and one
  EXPECT_EQ(layout.replica_of(2), -1);
  EXPECT_EQ(layout.stage_of(2), kEncoderStage);
}

TEST(Layout, TheLargestMicroBatchesOfARecipe) {
  ParallelSpec parallel;
  parallel.llm = {.dp = 2, .tp = 2};
  Recipe recipe = recipe_of(parallel);
  recipe.data.micro_batch = 3;
  recipe.data.global_batch = 12;
  recipe.data.max_length = 50;
  // A replica's two ranks encode two images and one, of 49 merged tokens, which 50 have room for.
  const StepMicrobatches all = largest_microbatches(*Layout::create(tiny_vision(), recipe));
  ASSERT_EQ(all.size(), 2);
  ASSERT_EQ(all[1].size(), 2);
  EXPECT_EQ(all[1][1].tokens, 150);
  EXPECT_EQ(all[1][1].targets, 147);
  EXPECT_EQ(all[1][1].patches, (std::vector<int64_t>{2 * 14 * 14, 14 * 14}));
  // An encoder's own ranks take turns: each replica's first micro batch, then the second ones.
  recipe.parallel.vision_encoder = ModuleLayout{.dp = 2, .ranks = 2};
  const StepMicrobatches apart = largest_microbatches(*Layout::create(tiny_vision(), recipe));
  EXPECT_EQ(apart[0][0].patches, (std::vector<int64_t>{2 * 14 * 14, 14 * 14}));
  EXPECT_EQ(apart[1][0].patches, (std::vector<int64_t>{14 * 14, 2 * 14 * 14}));
  EXPECT_EQ(apart[1][1].patches, apart[1][0].patches);
}

}  // namespace
}  // namespace parvl
