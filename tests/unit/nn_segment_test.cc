// Segments: recompute, deferred weight gradients and release change nothing; parameters and their table.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "parvl/nn/layers.h"
#include "parvl/nn/segment.h"

namespace parvl {
namespace {

using at::Tensor;

Tensor random_tensor(at::IntArrayRef shape, uint64_t seed, at::ScalarType type) {
  return at::empty(shape, at::kFloat).normal_(0, 1, at::make_generator<at::CPUGeneratorImpl>(seed)).to(type);
}

RotaryTable angles(int64_t tokens, int64_t pairs, at::ScalarType type) {
  const Tensor turned = random_tensor({tokens, pairs}, 3, type == at::kDouble ? at::kDouble : at::kFloat);
  return {turned.cos(), turned.sin()};
}

// One decoder layer and a branch that only some outputs come from.
struct Fixture {
  explicit Fixture(at::ScalarType dtype, int64_t tokens = 11) : type(dtype) {
    BackboneSpec spec;
    spec.layers = 1;
    spec.hidden = 24;
    spec.heads = 4;
    spec.kv_heads = 2;
    spec.head_dim = 6;
    spec.intermediate = 40;
    spec.qkv_bias = true;
    layer = make_decoder_layer(table, spec, 0);
    table.allocate(type, at::kCPU);
    table.initialise(5, 0.3);
    for (Param* param : table.owned())
      param->main_grad = at::zeros(param->shape, type == at::kDouble ? at::kDouble : at::kFloat);
    rope = angles(tokens, 3, type);
    attention = std::make_shared<PackedBackend>(SeqLayout({tokens - 4, 4}, at::kCPU));
    input = random_tensor({tokens, 24}, 1, type);
    side = random_tensor({tokens, 24}, 2, type);
    grad_hidden = random_tensor({tokens, 24}, 4, type);
  }

  Piece piece() {
    return {"layer", {"llm_backbone.layers.0."}, [this](const Bundle& in) {
              ++runs;
              const Tensor hidden = layer(in.at("hidden") + in.at("side") * 0.5, rope, *attention);
              return Bundle{{"hidden", hidden}, {"unused", in.at("side") * 2}};
            }};
  }

  Bundle inputs() const { return {{"hidden", input}, {"side", side}}; }

  at::ScalarType type;
  ParamTable table;
  DecoderLayer layer;
  RotaryTable rope;
  std::shared_ptr<PackedBackend> attention;
  Tensor input, side, grad_hidden;
  int runs = 0;
};

// Everything that a forward and a backward give.
struct Outcome {
  Bundle out, grad_in;
  std::vector<Tensor> weight_grads;
};

Outcome run(Fixture& f, SegmentOptions options, bool defer) {
  Outcome outcome;
  for (Param* param : f.table.owned()) {
    if (param->trainable()) param->main_grad.zero_();
  }
  Segment segment(f.piece(), options);
  outcome.out = segment.forward(f.inputs());
  for (const auto& [name, tensor] : outcome.out.entries()) EXPECT_FALSE(tensor.requires_grad()) << name;
  outcome.grad_in = segment.backward_input({{"hidden", f.grad_hidden}}, defer);
  if (defer) {
    for (Param* param : f.table.owned()) {
      EXPECT_EQ(param->main_grad.abs().max().item<double>(), 0) << param->name << " was not deferred";
    }
    segment.backward_weight();
  }
  segment.release();
  for (Param* param : f.table.owned())
    outcome.weight_grads.push_back(param->trainable() ? param->main_grad.clone() : Tensor());
  return outcome;
}

void expect_same_bits(const Bundle& got, const Bundle& want) {
  ASSERT_EQ(got.entries().size(), want.entries().size());
  for (const auto& [name, tensor] : want.entries()) EXPECT_TRUE(at::equal(got.at(name), tensor)) << name;
}

void expect_same_bits(const Outcome& got, const Outcome& want) {
  expect_same_bits(got.out, want.out);
  expect_same_bits(got.grad_in, want.grad_in);
  for (size_t i = 0; i < want.weight_grads.size(); ++i)
    EXPECT_TRUE(at::equal(got.weight_grads[i], want.weight_grads[i])) << i;
}

TEST(Segment, RecomputeAndDeferredWeightsChangeNoBit) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const int64_t tokens : {5, 11, 64}) {  // and fewer rows than the matrix-vector kernel takes, inside
      SCOPED_TRACE(::testing::Message() << at::toString(type) << ", " << tokens << " tokens");
      Fixture f(type, tokens);
      const Outcome want = run(f, {}, false);
      EXPECT_EQ(f.runs, 1);
      EXPECT_GT(want.grad_in.at("hidden").abs().max().item<double>(), 0);
      EXPECT_GT(want.grad_in.at("side").abs().max().item<double>(), 0);
      for (const Tensor& grad : want.weight_grads) EXPECT_GT(grad.abs().max().item<double>(), 0);
      expect_same_bits(run(f, {.recompute = true}, false), want);
      EXPECT_EQ(f.runs, 3) << "recompute runs the piece twice";
      expect_same_bits(run(f, {}, true), want);
      expect_same_bits(run(f, {.recompute = true}, true), want);
    }
  }
}

// Few rows take another path when serving; recomputation must not take it.
TEST(Segment, RecomputeOfFewRowsChangesNoBit) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (int64_t rows = 1; rows <= 5; ++rows) {
      SCOPED_TRACE(::testing::Message() << at::toString(type) << ", " << rows << " rows");
      ParamTable table;
      const Linear layer = make_linear(table, Module::kBackbone, "l", 133, 50, true, {Split::kNone});
      table.allocate(type, at::kCPU);
      table.initialise(1, 1);
      for (Param* param : table.owned()) param->main_grad = at::zeros(param->shape, at::kFloat);
      const Piece piece{"l", {}, [&](const Bundle& in) { return Bundle{{"y", layer(in.at("x"))}}; }};
      const Bundle in{{"x", random_tensor({rows, 133}, 2, type)}};
      Segment plain(piece, {}), again(piece, {.recompute = true}),
          frozen(piece, {.input_grad = false, .weight_grad = false});
      const Tensor want = plain.forward(in).at("y");
      EXPECT_TRUE(at::equal(again.forward(in).at("y"), want));
      EXPECT_TRUE(at::equal(frozen.forward(in).at("y"), want));
    }
  }
}

TEST(Segment, WithoutInputGradientOnlyWeightsGetOne) {
  Fixture f(at::kDouble);
  const Outcome want = run(f, {}, false);
  for (const bool recompute : {false, true}) {
    const Outcome got = run(f, {.input_grad = false, .recompute = recompute}, false);
    EXPECT_TRUE(got.grad_in.empty());
    for (size_t i = 0; i < want.weight_grads.size(); ++i)
      EXPECT_TRUE(at::equal(got.weight_grads[i], want.weight_grads[i]));
  }
}

TEST(Segment, FrozenWeightsPassTheInputsGradientOn) {
  Fixture f(at::kDouble);
  const Outcome want = run(f, {}, false);
  for (Param* param : f.table.owned()) param->main_grad = Tensor();
  f.table.link_tied();
  for (const bool recompute : {false, true}) {
    const Outcome got = run(f, {.weight_grad = false, .recompute = recompute}, false);
    expect_same_bits(got.out, want.out);
    expect_same_bits(got.grad_in, want.grad_in);
  }
  for (Param* param : f.table.owned()) EXPECT_FALSE(param->main_grad.defined());
}

TEST(Segment, KeepsNothingWhenNothingTrains) {
  Fixture f(at::kFloat);
  for (Param* param : f.table.owned()) param->main_grad = Tensor();
  Segment segment(f.piece(), {.input_grad = false, .weight_grad = false});
  const c10::weak_intrusive_ptr<c10::TensorImpl> hidden = [&] {
    const Bundle out = segment.forward(f.inputs());
    return c10::weak_intrusive_ptr<c10::TensorImpl>(out.at("hidden").getIntrusivePtr());
  }();
  EXPECT_TRUE(hidden.expired()) << "the output outlives its reader";
  EXPECT_TRUE(segment.backward_input({{"hidden", f.grad_hidden}}).empty());
  EXPECT_EQ(f.runs, 1);
}

// What a piece made on the way is freed by release, and by backward alone too.
TEST(Segment, FreesWhatItHolds) {
  for (const bool recompute : {false, true}) {
    for (const bool backward : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "recompute " << recompute << ", backward " << backward);
      Tensor input = random_tensor({4, 4}, 1, at::kFloat);
      c10::weak_intrusive_ptr<c10::StorageImpl> kept_input(input.storage().getWeakStorageImpl()), middle(kept_input);
      const Piece piece{"p", {}, [&](const Bundle& in) {
                          const Tensor y = in.at("x").exp();
                          middle = c10::weak_intrusive_ptr<c10::StorageImpl>(y.storage().getWeakStorageImpl());
                          return Bundle{{"y", y.square()}};
                        }};
      Segment segment(piece, {.recompute = recompute});
      Bundle in{{"x", input}};
      Tensor out = segment.forward(in).at("y");
      in = {};
      input = Tensor();
      EXPECT_EQ(middle.expired(), recompute) << "plain keeps the graph, recompute only the input";
      EXPECT_FALSE(kept_input.expired());
      if (backward) {
        EXPECT_TRUE(segment.backward_input({{"y", at::ones_like(out)}}).find("x").defined());
      } else {
        segment.release();
      }
      EXPECT_TRUE(middle.expired());
      EXPECT_TRUE(kept_input.expired());
    }
  }
}

TEST(Segment, OutputsWithoutAGradientCountAsZero) {
  Fixture f(at::kDouble);
  Segment segment(f.piece(), {});
  segment.forward(f.inputs());
  const Bundle grad = segment.backward_input({{"unused", f.grad_hidden}});
  EXPECT_TRUE(at::allclose(grad.at("side"), f.grad_hidden * 2));
  for (Param* param : f.table.owned()) EXPECT_EQ(param->main_grad.abs().max().item<double>(), 0) << param->name;
  Segment nothing(f.piece(), {});
  nothing.forward(f.inputs());
  const Bundle zero = nothing.backward_input({});
  ASSERT_FALSE(zero.empty());  // so that ranks with and without samples of a kind make the same calls
  for (const auto& [name, tensor] : zero.entries()) EXPECT_EQ(tensor.abs().max().item<double>(), 0) << name;
}

TEST(ParamTable, NamesOrderAndKinds) {
  ParamTable table;
  Param* matrix = table.add(Module::kVisionEncoder, "a.weight", {3, 5}, Init::kNormal, {.dim = 1});
  Param* vector = table.add(Module::kProjector, "b", {7}, Init::kOnes);
  EXPECT_EQ(matrix->name, "vision_encoder.a.weight");
  EXPECT_EQ(vector->name, "projector.b");
  EXPECT_EQ(table.find("projector.b"), vector);
  EXPECT_EQ(table.find("b"), nullptr);
  EXPECT_EQ(table.owned(), (std::vector<Param*>{matrix, vector}));
  EXPECT_EQ(matrix->numel(), 15);
  EXPECT_TRUE(matrix->is_matrix());
  EXPECT_FALSE(vector->is_matrix());
  EXPECT_FALSE(matrix->trainable());
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(table.add(Module::kProjector, "b", {1}), "used twice");
}

TEST(ParamTable, TiedParametersShareTensors) {
  ParamTable table;
  Param* owner = table.add(Module::kBackbone, "embed", {4, 2});
  Param* tied = table.add(Module::kBackbone, "head", {4, 2});
  tied->tied_to = owner;
  table.allocate(at::kFloat, at::kCPU);
  table.initialise(1, 1);
  EXPECT_EQ(table.owned(), std::vector<Param*>{owner});
  EXPECT_TRUE(tied->value.is_same(owner->value));
  EXPECT_TRUE(tied->master.is_same(owner->master));
  owner->main_grad = at::zeros({4, 2});
  EXPECT_FALSE(tied->trainable());
  table.link_tied();
  EXPECT_TRUE(tied->main_grad.is_same(owner->main_grad));
}

TEST(ParamTable, InitialValuesDependOnSeedAndNameAlone) {
  const auto values = [](uint64_t seed, std::vector<std::string> names, at::ScalarType type) {
    ParamTable table;
    for (const std::string& name : names) table.add(Module::kBackbone, name, {64, 32});
    table.add(Module::kBackbone, "ones", {5}, Init::kOnes);
    table.add(Module::kBackbone, "zeros", {5}, Init::kZeros);
    table.allocate(type, at::kCPU);
    table.initialise(seed, 0.02);
    EXPECT_TRUE(table.find("llm_backbone.ones")->value.eq(1).all().item<bool>());
    EXPECT_TRUE(table.find("llm_backbone.zeros")->value.eq(0).all().item<bool>());
    return table.find("llm_backbone.x")->value;
  };
  const Tensor x = values(3, {"x"}, at::kFloat);
  EXPECT_TRUE(at::equal(values(3, {"y", "x", "z"}, at::kFloat), x)) << "depends on what else there is";
  EXPECT_TRUE(at::equal(values(3, {"x"}, at::kBFloat16), x.to(at::kBFloat16))) << "depends on the type";
  EXPECT_TRUE(at::equal(values(3, {"x"}, at::kDouble), x.to(at::kDouble)));
  EXPECT_FALSE(at::equal(values(4, {"x"}, at::kFloat), x)) << "the seed changes nothing";
  EXPECT_NEAR(x.std().item<double>(), 0.02, 0.001);
  EXPECT_NEAR(x.mean().item<double>(), 0, 0.002);
}

TEST(ParamTable, InitialiseFillsTheMasterToo) {
  ParamTable table;
  Param* param = table.add(Module::kBackbone, "x", {8, 8});
  table.allocate(at::kBFloat16, at::kCPU);
  param->master = at::empty({8, 8}, at::kFloat);
  table.initialise(1, 1);
  EXPECT_TRUE(at::equal(param->master.to(at::kBFloat16), param->value));
}

}  // namespace
}  // namespace parvl
