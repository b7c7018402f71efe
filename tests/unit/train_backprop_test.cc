// Gradients of one step: accumulation, recomputation, batches without targets, clipping, freezing, types.
#include <cmath>
#include <numeric>

#include "parvl/train/pipeline_run.h"
#include "train_fixture.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

class BackpropTest : public TrainFixture {
 protected:
  std::map<std::string, at::Tensor> gradients_of(const std::vector<int>& lines) {
    auto trainer = make();
    const auto result = trainer->train_step(batch(lines));
    EXPECT_TRUE(result.ok()) << result.status();
    loss_ = result->loss;
    return gradients(*trainer);
  }
  static double largest_difference(const std::map<std::string, at::Tensor>& a,
                                   const std::map<std::string, at::Tensor>& b) {
    EXPECT_EQ(a.size(), b.size());
    double largest = 0;
    for (const auto& [name, tensor] : a) {
      largest = std::max(largest, (tensor - b.at(name)).abs().max().item<double>());
      EXPECT_GT(tensor.abs().max().item<double>(), 0) << name << " got no gradient";
    }
    return largest;
  }
  double loss_ = 0;
};

TEST_F(BackpropTest, MicroBatchesAddUpToTheGlobalBatch) {
  // Line 3 has no image and line 4 no assistant turn, so with micro_batch 1 some micro batches have neither or nothing
  // to learn.
  const std::vector<int> lines = {0, 1, 2, 3, 4, 5, 6, 7};
  recipe_.data.global_batch = 8;
  recipe_.data.micro_batch = 8;
  const auto whole = gradients_of(lines);
  const double loss = loss_;
  for (int64_t micro : {1, 2, 4}) {
    recipe_.data.micro_batch = micro;
    EXPECT_LT(largest_difference(gradients_of(lines), whole), 1e-12) << micro;
    EXPECT_NEAR(loss_, loss, 1e-12);
  }
}

TEST_F(BackpropTest, RecomputationChangesNoBit) {
  for (const char* dtype : {"float64", "float32", "bfloat16"}) {
    recipe_.train.dtype = dtype;
    recipe_.train.recompute = "none";
    const auto kept = gradients_of({0, 1, 2, 3});
    const double loss = loss_;
    recipe_.train.recompute = "full";
    EXPECT_EQ(largest_difference(gradients_of({0, 1, 2, 3}), kept), 0) << dtype;
    EXPECT_EQ(loss_, loss);
  }
}

TEST_F(BackpropTest, GradientsFollowFiniteDifferences) {
  auto trainer = make();
  const GlobalBatch samples = batch({0, 1, 2, 3});
  const std::vector<SequenceInput> sequences = to_sequences(samples.samples, 0, 4);
  PipelineOptions options;
  options.scale = 1.0 / static_cast<double>(pack(trainer->model(), sequences, at::kCPU).num_targets);
  options.microbatches = {{.grids = grids_of(sequences)}};
  options.sequences = [&](int64_t) { return sequences; };
  const auto loss = [&] { return run_pipeline(trainer->model(), trainer->ranks(), at::kCPU, options).item<double>(); };
  loss();
  const auto slopes = gradients(*trainer);
  for (const Param* param : trainer->model().params().owned()) {
    const at::Tensor& grad = slopes.at(param->name);
    // Along the gradient itself, so that the slope is its squared norm.
    const double norm = grad.norm().item<double>(), h = 1e-5 / std::max(norm, 1e-3);
    const at::Tensor original = param->master.clone();
    param->value.copy_(original + h * grad);
    const double up = loss();
    param->value.copy_(original - h * grad);
    const double down = loss();
    param->value.copy_(original);
    EXPECT_NEAR((up - down) / (2 * h), norm * norm, 1e-4 * norm * norm + 1e-9) << param->name;
  }
}

TEST_F(BackpropTest, ABatchWithoutTargetsOnlyCounts) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    recipe_.train.dtype = dtype;
    recipe_.optim.weight_decay = 0.1;
    auto trainer = make();
    ASSERT_TRUE(trainer->train_step(batch({0, 1, 2, 3})).ok());
    const auto before = state(*trainer);
    const auto result = trainer->train_step(batch({4, 9, 4, 9}));
    ASSERT_TRUE(result.ok());
    EXPECT_EQ(result->targets, 0);
    EXPECT_EQ(result->loss, 0);
    EXPECT_GT(result->tokens, 0);
    EXPECT_TRUE(same(state(*trainer), before));
    EXPECT_EQ(trainer->optimizer().steps_done(), 2);
    ASSERT_TRUE(trainer->train_step(batch({0, 1, 2, 3})).ok());
    EXPECT_FALSE(same(state(*trainer), before));
  }
}

TEST_F(BackpropTest, ASampleWithoutTargetsChangesNoGradient) {
  recipe_.data.micro_batch = 1;
  const auto without = gradients_of({0, 1});
  const double loss = loss_;
  EXPECT_LT(largest_difference(gradients_of({0, 4, 1, 9}), without), 1e-15);
  EXPECT_NEAR(loss_, loss, 1e-15);
}

TEST_F(BackpropTest, ClippingScalesTheStepToTheNorm) {
  recipe_.optim.name = "sgd";
  recipe_.optim.lr = 1;
  const auto raw = gradients_of({0, 1, 2, 3});
  double sum = 0;
  for (const auto& [name, grad] : raw) sum += grad.pow(2).sum().item<double>();  // the tied head is not in there twice
  recipe_.optim.clip_norm = 0.01;
  auto trainer = make();
  std::map<std::string, at::Tensor> before;
  for (const Param* param : trainer->model().params().owned()) before[param->name] = param->master.clone();
  const auto result = trainer->train_step(batch({0, 1, 2, 3}));
  ASSERT_TRUE(result.ok());
  EXPECT_NEAR(result->grad_norm, std::sqrt(sum), 1e-12 * std::sqrt(sum));
  ASSERT_GT(result->grad_norm, 0.01);
  const double factor = 0.01 / (result->grad_norm + 1e-6);
  double moved = 0;
  for (const Param* param : trainer->model().params().owned()) {
    const at::Tensor step = before[param->name] - param->master;
    EXPECT_LT((step - raw.at(param->name) * factor).abs().max().item<double>(), 1e-14) << param->name;
    moved += step.pow(2).sum().item<double>();
  }
  EXPECT_NEAR(std::sqrt(moved), 0.01, 1e-6);
  trainer.reset();
  // A norm below the limit is left alone.
  recipe_.optim.clip_norm = 1e6;
  EXPECT_EQ(largest_difference(gradients_of({0, 1, 2, 3}), raw), 0);
}

TEST_F(BackpropTest, FrozenModulesStayAndTheOthersLearnTheSame) {
  const auto all = gradients_of({0, 1, 2, 3});
  const std::vector<std::vector<std::string>> plans = {{"vision_encoder.*"},
                                                       {"vision_encoder.*", "projector.*"},
                                                       {"llm_backbone.*"},
                                                       {"llm_backbone.*", "vision_encoder.*"},
                                                       {"projector.*", "llm_backbone.embed.weight"},
                                                       {"vision_encoder.blocks.0.*", "llm_backbone.layers.1.*"}};
  for (const auto& plan : plans) {
    for (const char* recompute : {"none", "full"}) {
      recipe_.train.freeze = plan;
      recipe_.train.recompute = recompute;
      auto trainer = make();
      ASSERT_TRUE(trainer != nullptr);
      std::map<std::string, at::Tensor> before;
      for (const Param* param : trainer->model().params().owned()) before[param->name] = param->master.clone();
      ASSERT_TRUE(trainer->train_step(batch({0, 1, 2, 3})).ok());
      for (const Param* param : trainer->model().params().owned()) {
        const bool frozen = std::any_of(plan.begin(), plan.end(),
                                        [&](const auto& pattern) { return matches_pattern(pattern, param->name); });
        EXPECT_EQ(param->trainable(), !frozen) << param->name;
        EXPECT_EQ(param->master.equal(before[param->name]), frozen) << param->name;
        if (!frozen) {
          EXPECT_LT((param->main_grad - all.at(param->name)).abs().max().item<double>(), 1e-12) << param->name;
        }
      }
    }
  }
}

TEST_F(BackpropTest, FrozenPatternWithoutAMatchIsExit2) {
  recipe_.train.freeze = {"vision_encoder.*", "adapter.*"};
  const auto trainer = Trainer::create(recipe_, environment());
  EXPECT_EQ(exit_code(trainer.status()), 2);
  EXPECT_THAT(trainer.status().message(), HasSubstr("train.freeze pattern 'adapter.*' matches no parameter"));
}

TEST_F(BackpropTest, TypesWhileTraining) {
  const std::vector<std::tuple<std::string, at::ScalarType, at::ScalarType>> rows = {
      {"float32", at::kFloat, at::kFloat},
      {"bfloat16", at::kFloat, at::kBFloat16},
      {"float64", at::kDouble, at::kDouble}};
  for (const auto& [dtype, wide, value] : rows) {
    recipe_.train.dtype = dtype;
    auto trainer = make();
    ASSERT_TRUE(trainer->train_step(batch({0, 1, 2, 3})).ok());
    for (const Param* param : trainer->model().params().owned()) {
      EXPECT_EQ(param->value.scalar_type(), value);
      EXPECT_EQ(param->master.scalar_type(), wide);
      EXPECT_EQ(param->main_grad.scalar_type(), wide);
      EXPECT_TRUE(param->value.equal(param->master.to(value))) << param->name;
    }
    for (const OptimGroupState& group : trainer->optimizer().groups()) {
      EXPECT_EQ(group.moment1.scalar_type(), wide);
      EXPECT_EQ(group.moment2.scalar_type(), wide);
    }
  }
}

TEST_F(BackpropTest, NumbersThatAreNotFiniteDoNotReachTheWeights) {
  auto trainer = make();
  ASSERT_TRUE(trainer->train_step(batch({0, 1, 2, 3})).ok());
  const auto before = state(*trainer);
  const Param* norm = trainer->model().params().find("llm_backbone.norm.weight");
  const at::Tensor kept = norm->master.clone();
  norm->value.fill_(std::nan(""));  // in float64 value and master are one
  const auto result = trainer->train_step(batch({0, 1, 2, 3}));
  EXPECT_EQ(exit_code(result.status()), 1);
  EXPECT_THAT(result.status().message(), HasSubstr("step 2: the loss is nan"));
  norm->value.copy_(kept);
  EXPECT_TRUE(same(state(*trainer), before));
  EXPECT_EQ(trainer->optimizer().steps_done(), 1);
}

}  // namespace
}  // namespace parvl
