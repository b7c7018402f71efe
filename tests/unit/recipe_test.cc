#include "parvl/train/recipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace parvl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class RecipeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::temp_directory_path() / ("parvl_recipe_" + std::to_string(::getpid()) + "_" +
                                                  ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<Recipe> load(const std::string& text, const std::vector<std::string>& overrides = {}) {
    std::ofstream(folder_ / "r.yaml") << text;
    return load_recipe((folder_ / "r.yaml").string(), overrides);
  }
  // The error without the folder in front, so that it starts with the file's name.
  std::string error(const std::string& text, const std::vector<std::string>& overrides = {}) {
    const auto recipe = load(text, overrides);
    if (recipe.ok()) return "";
    std::string message(recipe.status().message());
    const std::string prefix = folder_.string() + "/";
    return message.rfind(prefix, 0) == 0 ? message.substr(prefix.size()) : message;
  }
  std::string inside(const std::string& name) { return (folder_ / name).string(); }

  std::filesystem::path folder_;
};

constexpr const char* kSmallest = "model: m\ndata: {train: d.jsonl}\ntrain: {out: o}\n";

TEST_F(RecipeTest, DefaultsAreTheContracts) {
  const auto recipe = load(kSmallest);
  ASSERT_TRUE(recipe.ok()) << recipe.status();
  EXPECT_EQ(recipe->model, inside("m"));
  EXPECT_EQ(recipe->seed, 0u);
  EXPECT_EQ(recipe->data.train, inside("d.jsonl"));
  EXPECT_EQ(recipe->data.eval, "");
  EXPECT_EQ(recipe->data.micro_batch, 4);
  EXPECT_EQ(recipe->data.global_batch, 16);
  EXPECT_EQ(recipe->data.shuffle_seed, 0u);
  EXPECT_EQ(recipe->data.max_length, 0);
  EXPECT_EQ(recipe->data.augment, "none");
  EXPECT_EQ(recipe->optim.name, "adamw");
  EXPECT_EQ(recipe->optim.lr, 1e-3);
  EXPECT_EQ(recipe->optim.betas, std::make_pair(0.9, 0.95));
  EXPECT_EQ(recipe->optim.eps, 1e-8);
  EXPECT_EQ(recipe->optim.weight_decay, 0);
  EXPECT_EQ(recipe->optim.momentum, 0);
  EXPECT_EQ(recipe->optim.schedule, "constant");
  EXPECT_EQ(recipe->optim.warmup_steps, 0);
  EXPECT_EQ(recipe->optim.clip_norm, 0);
  EXPECT_TRUE(recipe->optim.groups.empty());
  EXPECT_EQ(recipe->train.steps, 1000);
  EXPECT_EQ(recipe->train.device, "auto");
  EXPECT_EQ(recipe->train.dtype, "float32");
  EXPECT_TRUE(recipe->train.freeze.empty());
  EXPECT_EQ(recipe->train.recompute, "none");
  EXPECT_EQ(recipe->train.resume, "auto");
  EXPECT_EQ(recipe->train.checkpoint_every, 0);
  EXPECT_EQ(recipe->train.log_every, 10);
  EXPECT_EQ(recipe->train.out, inside("o"));
}

// The contract's block as it stands there (with folders filled in) must load, and so must every value of its comments.
TEST_F(RecipeTest, TheContractsExampleLoads) {
  const auto recipe = load(
      "model: DIR            # a Hugging Face directory to start from\n"
      "data: {train: \"easy-vqa:train\", eval: \"\", micro_batch: 4, global_batch: 16, shuffle_seed: 0, max_length: 0, "
      "augment: none}   # augment: none | dihedral\n"
      "optim: {name: adamw, lr: 1.0e-3, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0, schedule: constant, "
      "warmup_steps: "
      "0, clip_norm: 0,\n"
      "        groups: [{match: \"projector.*\", lr: 1.0e-4, weight_decay: 0}]}\n"
      "train: {steps: 1000, device: auto, dtype: float32, freeze: [], recompute: none,   # recompute: none | full\n"
      "        resume: auto, checkpoint_every: 0, log_every: 10, out: DIR}\n"
      "parallel:\n"
      "  llm_backbone:   {dp: 1, tp: 1, pp: 1, sp: 1, ep: 1}\n"
      "  vision_encoder: {}   # left out: dp over all LLM ranks\n"
      "  zero: 0\n"
      "  schedule: 1f1b      # interleaved, zero-bubble\n");
  ASSERT_TRUE(recipe.ok()) << recipe.status();
  EXPECT_EQ(recipe->data.train, "easy-vqa:train");
  ASSERT_EQ(recipe->optim.groups.size(), 1u);
  EXPECT_EQ(recipe->optim.groups[0].match, "projector.*");
  EXPECT_EQ(recipe->optim.groups[0].lr, 1e-4);
  EXPECT_EQ(recipe->optim.groups[0].weight_decay, 0);
}

TEST_F(RecipeTest, RandomWeightsAndAllKeys) {
  const auto recipe = load(
      "config: c.json\ntokenizer: /abs/tok\nseed: 18446744073709551615\n"
      "data: {train: sub/../d.jsonl, eval: easy-vqa:holdout, micro_batch: 3, global_batch: 9, shuffle_seed: 5, "
      "max_length: "
      "77, augment: dihedral}\n"
      "optim: {name: sgd, momentum: 0.9, schedule: cosine, warmup_steps: 10, clip_norm: 1, groups: [{match: a}]}\n"
      "train: {steps: 3, device: cuda, dtype: bfloat16, freeze: [vision_encoder.*], recompute: full, resume: "
      "ck/step-3, "
      "checkpoint_every: 2, log_every: 1, out: /abs/out}\n");
  ASSERT_TRUE(recipe.ok()) << recipe.status();
  EXPECT_EQ(recipe->config, inside("c.json"));
  EXPECT_EQ(recipe->tokenizer, "/abs/tok");
  EXPECT_EQ(recipe->seed, UINT64_MAX);
  EXPECT_EQ(recipe->data.train, inside("d.jsonl"));
  EXPECT_EQ(recipe->data.eval, "easy-vqa:holdout");
  EXPECT_EQ(recipe->train.resume, inside("ck/step-3"));
  EXPECT_EQ(recipe->train.out, "/abs/out");
  EXPECT_THAT(recipe->train.freeze, ElementsAre("vision_encoder.*"));
  EXPECT_LT(recipe->optim.groups[0].lr, 0);
}

TEST_F(RecipeTest, OverridesApplyInOrder) {
  const auto recipe = load(kSmallest, {"train.steps=5", "train.steps=6", "optim.betas=[0.5, 0.6]",
                                       "data.global_batch=4", "model=", "config=c.json", "tokenizer=t"});
  ASSERT_TRUE(recipe.ok()) << recipe.status();
  EXPECT_EQ(recipe->train.steps, 6);
  EXPECT_EQ(recipe->optim.betas, std::make_pair(0.5, 0.6));
  EXPECT_EQ(recipe->model, "");
  EXPECT_EQ(recipe->config, inside("c.json"));
}

TEST_F(RecipeTest, StartIsModelOrConfigWithTokenizer) {
  const std::string rest = "data: {train: d}\ntrain: {out: o}\n";
  EXPECT_THAT(error(rest), HasSubstr("'model' is missing; give a Hugging Face directory"));
  EXPECT_THAT(error("config: c\n" + rest), HasSubstr("'tokenizer' is missing"));
  EXPECT_THAT(error("tokenizer: c\n" + rest), HasSubstr("'config' is missing"));
  EXPECT_EQ(error("model: m\nconfig: c\n" + rest),
            "r.yaml:2: 'config' does not go together with 'model'; give either model, or config and tokenizer");
}

struct Refusal {
  const char* override_text;
  const char* message;
};

TEST_F(RecipeTest, EveryRefusalNamesTheKeyAndWhatIsValid) {
  const Refusal cases[] = {
      {"data.global_batch=10",
       "'data.global_batch' does not fit: global_batch (10) must be a multiple of micro_batch (4)"},
      {"data.micro_batch=5",
       "'data.micro_batch' does not fit: global_batch (16) must be a multiple of micro_batch (5)"},
      {"data.micro_batch=0", "'data.micro_batch' must be a whole number from 1 to 1048576, found '0'"},
      {"data.train=", "'data.train' is missing; give it a FILE.jsonl or easy-vqa:train"},
      {"data.train=easy-vqa:trian", "unknown split 'trian'; valid: easy-vqa:train, easy-vqa:test, easy-vqa:fit"},
      {"data.eval=\"easy-vqa:\"", "'data.eval' names an unknown split ''"},
      {"data.augment=flip", "'data.augment' must be one of none, dihedral, found 'flip'"},
      {"data.max_length=-1", "'data.max_length' must be a whole number of at least 0, found '-1'"},
      {"data.shuffle_seed=-1", "'data.shuffle_seed' must be a whole number from 0"},
      {"data.micro_bach=2", "unknown key 'data.micro_bach'; valid here: micro_batch, "},
      {"optim.name=adam", "'optim.name' must be one of adamw, sgd, found 'adam'"},
      {"optim.lr=-1", "'optim.lr' must be a number of at least 0, found '-1'"},
      {"optim.lr=inf", "'optim.lr' must be a number of at least 0"},
      {"optim.betas=[0.9]", "'optim.betas' must list two numbers in [0, 1), found 1"},
      {"optim.betas=[0.9, 1]", "'optim.betas' must list numbers in [0, 1), found '1'"},
      {"optim.betas=[-0.1, 0.5]", "'optim.betas' must list numbers in [0, 1), found '-0.1'"},
      {"optim.eps=0", "'optim.eps' must be a number above 0, found '0'"},
      {"optim.weight_decay=-1", "'optim.weight_decay' must be a number of at least 0"},
      {"optim.momentum=0.5", "'optim.momentum' belongs to sgd"},
      {"optim.momentum=1", "'optim.momentum' must be a number in [0, 1), found '1'"},
      {"optim.schedule=cos", "'optim.schedule' must be one of cosine, constant, linear, found 'cos'"},
      {"optim.warmup_steps=-1", "'optim.warmup_steps' must be a whole number from 0"},
      {"optim.clip_norm=-1", "'optim.clip_norm' must be a number of at least 0"},
      {"optim.groups=3", "'optim.groups' must be a list of sections"},
      {"optim.groups=[{lr: 1}]", "'optim.groups.0.match' is missing"},
      {"optim.groups=[{match: a, rl: 1}]", "unknown key 'optim.groups.0.rl'; valid here: lr, "},
      {"train.steps=0", "'train.steps' must be a whole number from 1"},
      {"train.device=gpu", "'train.device' must be one of cpu, auto, cuda, found 'gpu'"},
      {"train.dtype=float16", "'train.dtype' must be one of bfloat16, float32, float64, found 'float16'"},
      {"train.recompute=some", "'train.recompute' must be one of none, full, found 'some'"},
      {"train.resume=\"\"", "'train.resume' must be auto, never, must, or the PATH of a checkpoint"},
      {"train.checkpoint_every=-1", "'train.checkpoint_every' must be a whole number from 0"},
      {"train.log_every=0", "'train.log_every' must be a whole number from 1"},
      {"train.out=", "'train.out' is missing"},
      {"trian.steps=1", "unknown key 'trian'; valid here: train, "},
      {"seed=x", "'seed' must be a whole number from 0"},
      {"parallel.zero=4", "'parallel.zero' must be a whole number from 0 to 3, found '4'"},
      {"parallel.schedule=gpipe", "'parallel.schedule' must be one of 1f1b, interleaved, zero-bubble, found 'gpipe'"},
      {"parallel.llm_backbone.tp=0", "'parallel.llm_backbone.tp' must be a whole number from 1"},
      {"parallel.llm_backbone.ep=2", "'parallel.llm_backbone.ep' (2) must divide dp"},
      {"parallel.llm_backbone.ranks=2", "unknown key 'parallel.llm_backbone.ranks'"},
      {"parallel.llm_backbone.stages=[2, 2]", "'parallel.llm_backbone.stages' lists 2 stages"},
      {"parallel.vision_encoder.tp=2", "'parallel.vision_encoder.tp' does not fit: dp"},
      {"parallel.vison_encoder.tp=2", "unknown key 'parallel.vison_encoder'; valid here: vision_encoder, "},
  };
  for (const Refusal& c : cases) {
    const auto recipe = load(kSmallest, {c.override_text});
    ASSERT_FALSE(recipe.ok()) << c.override_text;
    EXPECT_EQ(recipe.status().code(), absl::StatusCode::kInvalidArgument) << recipe.status();
    EXPECT_THAT(std::string(recipe.status().message()), HasSubstr(c.message)) << c.override_text;
    EXPECT_THAT(std::string(recipe.status().message()), HasSubstr(std::string(c.override_text).substr(0, 3)));
  }
}

TEST_F(RecipeTest, OverrideErrorsNameTheOverride) {
  EXPECT_THAT(error(kSmallest, {"optim.lr=-1"}), StartsWith("--set 'optim.lr=-1': "));
  EXPECT_THAT(error(kSmallest, {"optim.rl=1"}), StartsWith("--set 'optim.rl=1': unknown key 'optim.rl'"));
}

TEST_F(RecipeTest, FileErrorsNameTheLine) {
  EXPECT_EQ(error("model: m\ndata:\n  train: d\n  micro_bach: 3\ntrain: {out: o}\n"),
            "r.yaml:4: unknown key 'data.micro_bach'; valid here: micro_batch, global_batch, train, "
            "max_length, eval, augment, shuffle_seed");
}

TEST_F(RecipeTest, LayoutsThatAreNotBuiltYetSaySo) {
  const Refusal cases[] = {
      {"parallel.llm_backbone.sp=2",
       "'parallel.llm_backbone.sp' = 2 is not available yet; leave it out or set it to 1"},
      {"parallel.llm_backbone={dp: 2, ep: 2}", "'parallel.llm_backbone.ep' = 2 is not available yet"},
      {"parallel.projector={dp: 2, ranks: 2}", "'parallel.projector.ranks' = 2 is not available yet"},
      {"parallel={vision_encoder: {ranks: 1}, projector: {dp: 1}}",
       "'parallel.projector' apart from a vision_encoder on its own ranks is not available yet; leave projector out"},
      {"parallel={llm_backbone: {dp: 2}, vision_encoder: {pp: 2}}",
       "'parallel.vision_encoder.pp' = 2 is not available yet"},
      {"parallel.llm_backbone.virtual_stages=2", "'parallel.llm_backbone.virtual_stages' = 2 is not available yet"},
      {"parallel.zero=2", "'parallel.zero' = 2 is not available yet; set it to 0 or 1"},
      {"parallel.schedule=zero-bubble", "'parallel.schedule' = zero-bubble is not available yet"},
  };
  for (const Refusal& c : cases) {
    const auto recipe = load(kSmallest, {c.override_text});
    EXPECT_EQ(recipe.status().code(), absl::StatusCode::kUnimplemented) << c.override_text << ": " << recipe.status();
    EXPECT_EQ(exit_code(recipe.status()), 2);
    EXPECT_THAT(std::string(recipe.status().message()), HasSubstr(c.message));
  }
  EXPECT_TRUE(load(kSmallest, {"parallel.llm={tp: 1}", "parallel.projector={dp: 1}"}).ok());
  EXPECT_THAT(error(kSmallest, {"parallel.llm.tp=1", "parallel.llm_backbone.tp=1"}), HasSubstr("alias"));
}

// The ranks that an encoder is cut over have the same samples.
TEST_F(RecipeTest, TensorParallelLayoutsAreRead) {
  const auto recipe = load(kSmallest, {"parallel.llm={tp: 2, dp: 2}", "parallel.projector={tp: 2, dp: 2}"});
  ASSERT_TRUE(recipe.ok()) << recipe.status();
  EXPECT_EQ(recipe->parallel.llm.tp, 2);
  EXPECT_EQ(recipe->parallel.projector->tp, 2);
  EXPECT_THAT(
      error(kSmallest, {"parallel.llm={tp: 2, dp: 2}", "parallel.vision_encoder.tp=4"}),
      HasSubstr("'parallel.vision_encoder.tp' (4) must divide llm_backbone.tp (2): the ranks that it is cut over"));
}

TEST_F(RecipeTest, AnEncodersOwnRanksAreRead) {
  const auto plain = load(kSmallest, {"parallel.llm.dp=2", "parallel.vision_encoder.ranks=3"});
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->parallel.vision_encoder->dp, 3);
  EXPECT_EQ(plain->parallel.world(), 5);
  // Cut over more ranks than the backbone is.
  const auto cut = load(kSmallest, {"parallel.vision_encoder={ranks: 4, dp: 2, tp: 2}"});
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_EQ(cut->parallel.vision_encoder->tp, 2);
  EXPECT_EQ(cut->parallel.world(), 5);
  EXPECT_THAT(error(kSmallest, {"parallel.vision_encoder={ranks: 4, tp: 2}"}),
              HasSubstr("dp · tp · pp · sp is 2, but the module covers 4 ranks of its own"));
}

TEST_F(RecipeTest, PipelinesAreRead) {
  const auto recipe = load(kSmallest, {"parallel.llm={pp: 2, stages: [3, 1]}"});
  ASSERT_TRUE(recipe.ok()) << recipe.status();
  EXPECT_EQ(recipe->parallel.llm.pp, 2);
  EXPECT_EQ(recipe->parallel.llm.stages, (std::vector<int64_t>{3, 1}));
}

TEST_F(RecipeTest, DataParallelLayoutsAreRead) {
  const auto recipe = load(kSmallest, {"parallel.llm.dp=4", "parallel.zero=1", "parallel.vision_encoder={dp: 4}"});
  ASSERT_TRUE(recipe.ok()) << recipe.status();
  EXPECT_EQ(recipe->parallel.llm.dp, 4);
  EXPECT_EQ(recipe->parallel.zero, 1);
  EXPECT_EQ(recipe->parallel.world(), 4);
  EXPECT_FALSE(recipe->parallel.projector.has_value());
  EXPECT_THAT(error(kSmallest, {"parallel.llm.dp=3"}),
              HasSubstr("global_batch (16) must be a multiple of micro_batch (4) · dp (3)"));
  EXPECT_THAT(error(kSmallest, {"parallel.llm.dp=2", "parallel.vision_encoder.dp=4"}), HasSubstr("does not fit"));
}

TEST(LrFactor, WarmUpThenSchedule) {
  OptimRecipe optim;
  EXPECT_EQ(lr_factor(optim, 0, 10), 1.0);
  optim.warmup_steps = 4;
  EXPECT_DOUBLE_EQ(lr_factor(optim, 0, 10), 0.25);
  EXPECT_DOUBLE_EQ(lr_factor(optim, 3, 10), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor(optim, 9, 10), 1.0);
  optim.schedule = "linear";
  EXPECT_DOUBLE_EQ(lr_factor(optim, 4, 10), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor(optim, 6, 10), 0.6);
  EXPECT_DOUBLE_EQ(lr_factor(optim, 9, 10), 0.0);
  optim.schedule = "cosine";
  optim.warmup_steps = 0;
  EXPECT_DOUBLE_EQ(lr_factor(optim, 0, 11), 1.0);
  EXPECT_NEAR(lr_factor(optim, 5, 11), 0.5, 1e-12);
  EXPECT_NEAR(lr_factor(optim, 10, 11), 0.0, 1e-12);
  EXPECT_DOUBLE_EQ(lr_factor(optim, 0, 1), 1.0);  // the only step still learns
  optim.warmup_steps = 100;
  EXPECT_DOUBLE_EQ(lr_factor(optim, 9, 10), 0.1);
}

TEST(MatchesPattern, StarsMatchAnyRun) {
  EXPECT_TRUE(matches_pattern("projector.*", "projector.mlp.0.weight"));
  EXPECT_FALSE(matches_pattern("projector.*", "vision_encoder.projector.x"));
  EXPECT_TRUE(matches_pattern("*.bias", "a.b.bias"));
  EXPECT_TRUE(matches_pattern("*norm*", "llm_backbone.layers.0.norm1.weight"));
  EXPECT_TRUE(matches_pattern("*", ""));
  EXPECT_TRUE(matches_pattern("a*b*c", "axxbyyc"));
  EXPECT_FALSE(matches_pattern("a*b*c", "axxbyy"));
  EXPECT_TRUE(matches_pattern("a**", "a"));
  EXPECT_FALSE(matches_pattern("", "a"));
  EXPECT_FALSE(matches_pattern("a.c", "abc"));
  // Exponential for a matcher that backtracks over every star.
  EXPECT_FALSE(matches_pattern("*a*a*a*a*a*a*a*a*a*a*b", std::string(200, 'a')));
}

}  // namespace
}  // namespace parvl
