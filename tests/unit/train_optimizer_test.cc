// AdamW and SGD against PyTorch's published formulas written out in plain double arithmetic; groups, freezing, norms,
// types.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "parvl/train/optimizer.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

// What PyTorch's documentation gives for one element of torch.optim.AdamW and torch.optim.SGD.
struct Element {
  double weight = 0, moment1 = 0, moment2 = 0;
  int64_t updates = 0;

  void adamw(double grad, double lr, double decay, const OptimRecipe& optim) {
    const double beta1 = optim.betas.first, beta2 = optim.betas.second;
    ++updates;
    weight -= lr * decay * weight;
    moment1 = beta1 * moment1 + (1 - beta1) * grad;
    moment2 = beta2 * moment2 + (1 - beta2) * grad * grad;
    const double unbiased1 = moment1 / (1 - std::pow(beta1, static_cast<double>(updates)));
    const double unbiased2 = moment2 / (1 - std::pow(beta2, static_cast<double>(updates)));
    weight -= lr * unbiased1 / (std::sqrt(unbiased2) + optim.eps);
  }

  void sgd(double grad, double lr, double decay, const OptimRecipe& optim) {
    ++updates;
    grad += decay * weight;
    moment1 = updates == 1 ? grad : optim.momentum * moment1 + grad;
    weight -= lr * (optim.momentum != 0 ? moment1 : grad);
  }
};

double pseudo(const std::string& name, int64_t index, int64_t step) {
  double phase = 0;
  for (char c : name) phase = std::fmod(phase * 31 + c, 97);
  return std::sin(phase + 1.7 * static_cast<double>(index) + 0.9 * static_cast<double>(step));
}

class OptimizerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    params_.add(Module::kVisionEncoder, "patch_embed.weight", {5, 3});
    params_.add(Module::kVisionEncoder, "patch_embed.bias", {5});
    params_.add(Module::kProjector, "fc1.weight", {4, 5});
    Param* embed = params_.add(Module::kBackbone, "embed.weight", {7, 4});
    params_.add(Module::kBackbone, "norm.weight", {4});
    params_.add(Module::kBackbone, "head.weight", {7, 4})->tied_to = embed;
  }

  absl::Status create(DType dtype) {
    auto made = Optimizer::create(params_, recipe_, dtype, at::kCPU);
    if (!made.ok()) return made.status();
    optimizer_ = *std::move(made);
    for (Param* param : params_.owned()) {
      for (int64_t i = 0; i < param->numel(); ++i) param->master.view(-1)[i].fill_(pseudo(param->name, i, -1));
      if (!param->master.is_same(param->value)) param->value.copy_(param->master);
    }
    optimizer_->refresh_values();
    return absl::OkStatus();
  }

  void set_grads(int64_t step) {
    for (Param* param : params_.owned()) {
      if (!param->trainable()) continue;
      for (int64_t i = 0; i < param->numel(); ++i) param->main_grad.view(-1)[i].fill_(pseudo(param->name, i, step));
    }
  }

  // Takes steps and compares every element with the formulas; `settings` gives (lr, decay) of a name.
  void compare(DType dtype, const std::function<std::pair<double, double>(const Param&)>& settings, double tolerance) {
    const absl::Status status = create(dtype);
    ASSERT_TRUE(status.ok()) << status;
    std::map<std::string, std::vector<Element>> reference;
    for (Param* param : params_.owned()) {
      for (int64_t i = 0; i < param->numel(); ++i) {
        reference[param->name].push_back({param->master.view(-1)[i].item<double>()});
      }
    }
    for (int64_t step = 0; step < 6; ++step) {
      const double factor = lr_factor(recipe_.optim, step, 6);
      set_grads(step);
      optimizer_->step(factor);
      for (Param* param : params_.owned()) {
        const auto [lr, decay] = settings(*param);
        for (int64_t i = 0; i < param->numel(); ++i) {
          Element& element = reference[param->name][static_cast<size_t>(i)];
          if (param->trainable()) {
            const double grad = param->main_grad.view(-1)[i].item<double>();
            recipe_.optim.name == "adamw" ? element.adamw(grad, lr * factor, decay, recipe_.optim)
                                          : element.sgd(grad, lr * factor, decay, recipe_.optim);
          }
          const double got = param->master.view(-1)[i].item<double>();
          ASSERT_NEAR(got, element.weight, tolerance) << param->name << "[" << i << "] after step " << step + 1;
        }
      }
    }
  }

  std::pair<double, double> plain(const Param& param) const {
    return {recipe_.optim.lr, param.shape.size() >= 2 ? recipe_.optim.weight_decay : 0.0};
  }

  Recipe recipe_;
  ParamTable params_;
  std::unique_ptr<Optimizer> optimizer_;
};

TEST_F(OptimizerTest, AdamWFollowsTheFormulas) {
  recipe_.optim.lr = 0.03;
  recipe_.optim.weight_decay = 0.2;
  recipe_.optim.betas = {0.8, 0.97};
  recipe_.optim.eps = 1e-3;
  compare(
      DType::kFloat64, [&](const Param& p) { return plain(p); }, 1e-14);
  compare(
      DType::kFloat32, [&](const Param& p) { return plain(p); }, 2e-6);
}

TEST_F(OptimizerTest, SgdFollowsTheFormulas) {
  recipe_.optim.name = "sgd";
  recipe_.optim.lr = 0.3;
  recipe_.optim.weight_decay = 0.1;
  for (double momentum : {0.0, 0.9}) {
    SCOPED_TRACE(momentum);
    recipe_.optim.momentum = momentum;
    compare(
        DType::kFloat64, [&](const Param& p) { return plain(p); }, 1e-14);
    EXPECT_EQ(optimizer_->groups()[0].moment1.defined(), momentum != 0);
    EXPECT_FALSE(optimizer_->groups()[0].moment2.defined());
    compare(
        DType::kFloat32, [&](const Param& p) { return plain(p); }, 5e-6);
  }
}

TEST_F(OptimizerTest, SchedulesScaleEveryGroupsRate) {
  recipe_.optim.weight_decay = 0.2;
  recipe_.optim.warmup_steps = 2;
  recipe_.optim.groups = {{"projector.*", 0.05, -1}};
  for (const char* schedule : {"constant", "cosine", "linear"}) {
    SCOPED_TRACE(schedule);
    recipe_.optim.schedule = schedule;
    compare(
        DType::kFloat64,
        [&](const Param& p) {
          return std::pair(p.name == "projector.fc1.weight" ? 0.05 : recipe_.optim.lr, plain(p).second);
        },
        1e-14);
  }
  // The factors themselves, so that the comparison is not one of a function with itself.
  EXPECT_DOUBLE_EQ(lr_factor(recipe_.optim, 0, 6), 0.5);
  EXPECT_DOUBLE_EQ(lr_factor(recipe_.optim, 1, 6), 1.0);
  EXPECT_DOUBLE_EQ(lr_factor(recipe_.optim, 3, 6), 1.0 - 1.0 / 3.0);
  EXPECT_DOUBLE_EQ(lr_factor(recipe_.optim, 5, 6), 0.0);
}

TEST_F(OptimizerTest, GroupsHaveTheirOwnRateAndDecayAndTheFirstMatchDecides) {
  recipe_.optim.lr = 0.01;
  recipe_.optim.weight_decay = 0.5;
  recipe_.optim.groups = {{"vision_encoder.*.weight", 0.1, 0.0}, {"vision_encoder.*", 0.2, -1}, {"*.norm.*", -1, 0.3}};
  const std::map<std::string, std::pair<double, double>> expected = {
      {"vision_encoder.patch_embed.weight", {0.1, 0.0}},
      {"vision_encoder.patch_embed.bias", {0.2, 0.0}},  // no decay on what is no matrix
      {"projector.fc1.weight", {0.01, 0.5}},
      {"llm_backbone.embed.weight", {0.01, 0.5}},
      {"llm_backbone.norm.weight", {0.01, 0.0}}};
  compare(
      DType::kFloat64, [&](const Param& p) { return expected.at(p.name); }, 1e-14);
}

TEST_F(OptimizerTest, FrozenParametersHaveNoGradientAndStay) {
  recipe_.train.freeze = {"vision_encoder.*", "llm_backbone.norm.weight"};
  compare(
      DType::kFloat64, [&](const Param& p) { return plain(p); }, 1e-14);  // a frozen one's reference never moves
  for (Param* param : params_.owned()) {
    const bool frozen = param->module == Module::kVisionEncoder || param->name == "llm_backbone.norm.weight";
    EXPECT_EQ(param->trainable(), !frozen) << param->name;
  }
}

TEST_F(OptimizerTest, TiedParametersGoByAllTheirNames) {
  recipe_.train.freeze = {"llm_backbone.head.*"};
  ASSERT_TRUE(create(DType::kFloat32).ok());
  EXPECT_FALSE(params_.find("llm_backbone.embed.weight")->trainable());
  recipe_.train.freeze = {};
  recipe_.optim.groups = {{"llm_backbone.head.weight", 0.25, -1}};
  compare(
      DType::kFloat64,
      [&](const Param& p) { return std::pair(p.name == "llm_backbone.embed.weight" ? 0.25 : 0.001, 0.0); }, 1e-14);
}

TEST_F(OptimizerTest, PatternsThatMatchNothingAreNamed) {
  recipe_.train.freeze = {"projector.*", "vision.*"};
  EXPECT_EQ(create(DType::kFloat32).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(create(DType::kFloat32).message(), HasSubstr("train.freeze pattern 'vision.*' matches no parameter"));
  recipe_.train.freeze = {};
  recipe_.optim.groups = {{"llm.*", 0.1, -1}};
  EXPECT_THAT(create(DType::kFloat32).message(), HasSubstr("optim.groups pattern 'llm.*' matches no parameter"));
  recipe_.optim.groups = {};
  recipe_.train.freeze = {"*"};
  EXPECT_THAT(create(DType::kFloat32).message(), HasSubstr("leaves no parameter to train"));
}

TEST_F(OptimizerTest, TypesOfMastersGradientsMomentsAndValues) {
  const std::vector<std::tuple<DType, at::ScalarType, at::ScalarType>> rows = {
      {DType::kFloat32, at::kFloat, at::kFloat},
      {DType::kBFloat16, at::kFloat, at::kBFloat16},
      {DType::kFloat64, at::kDouble, at::kDouble}};
  for (const auto& [dtype, wide, value] : rows) {
    ASSERT_TRUE(create(dtype).ok());
    set_grads(0);
    optimizer_->step(1.0);
    for (const OptimGroupState& group : optimizer_->groups()) {
      EXPECT_EQ(group.moment1.scalar_type(), wide);
      EXPECT_EQ(group.moment2.scalar_type(), wide);
    }
    for (const auto& param : params_.all()) {
      EXPECT_EQ(param->master.scalar_type(), wide) << param->name;
      EXPECT_EQ(param->main_grad.scalar_type(), wide) << param->name;
      EXPECT_EQ(param->value.scalar_type(), value) << param->name;
      EXPECT_TRUE(param->value.equal(param->master.to(value))) << param->name;  // refreshed by the step
    }
  }
}

TEST_F(OptimizerTest, SmallUpdatesAddUpInTheMastersOfBfloat16) {
  recipe_.optim.name = "sgd";
  recipe_.optim.lr = 1e-4;  // far below bfloat16's resolution at 1
  ASSERT_TRUE(create(DType::kBFloat16).ok());
  Param* norm = params_.find("llm_backbone.norm.weight");
  norm->master.fill_(1.0);
  optimizer_->refresh_values();
  for (int step = 0; step < 200; ++step) {
    norm->main_grad.fill_(1.0);
    optimizer_->step(1.0);
  }
  EXPECT_NEAR(norm->master[0].item<double>(), 0.98, 1e-5);
  EXPECT_NEAR(norm->value[0].item<double>(), 0.98, 4e-3);
}

TEST_F(OptimizerTest, GradNormCountsEachElementOnce) {
  recipe_.train.freeze = {"vision_encoder.patch_embed.weight"};
  recipe_.optim.groups = {{"projector.*", 0.1, -1}};
  ASSERT_TRUE(create(DType::kFloat64).ok());
  set_grads(3);
  double sum = 0;
  for (Param* param : params_.owned()) {  // without head.weight, which is embed.weight
    for (int64_t i = 0; param->trainable() && i < param->numel(); ++i) sum += std::pow(pseudo(param->name, i, 3), 2);
  }
  EXPECT_NEAR(optimizer_->grad_norm().item<double>(), std::sqrt(sum), 1e-14);
  const at::Tensor before = params_.find("projector.fc1.weight")->main_grad.clone();
  optimizer_->scale_grads(0.25);
  EXPECT_NEAR(optimizer_->grad_norm().item<double>(), std::sqrt(sum) / 4, 1e-14);
  EXPECT_TRUE(params_.find("projector.fc1.weight")->main_grad.allclose(before * 0.25, 1e-15));
  optimizer_->zero_grad();
  EXPECT_EQ(optimizer_->grad_norm().item<double>(), 0);
}

TEST_F(OptimizerTest, ASkippedStepCountsAndChangesNothingElse) {
  ASSERT_TRUE(create(DType::kFloat32).ok());
  set_grads(0);
  optimizer_->step(1.0);
  std::vector<at::Tensor> before;
  const auto state = [&] {
    std::vector<at::Tensor> out;
    for (const OptimGroupState& g : optimizer_->groups())
      out.insert(out.end(), {g.master, g.moment1, g.moment2, g.updates});
    return out;
  };
  for (const at::Tensor& tensor : state()) before.push_back(tensor.clone());
  optimizer_->skip_step();
  const auto after = state();
  for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(after[i].equal(before[i])) << i;
  EXPECT_EQ(optimizer_->steps_done(), 2);
  EXPECT_EQ(optimizer_->updates_done(), 1);
}

}  // namespace
}  // namespace parvl
