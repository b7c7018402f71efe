// Differentiable operations against PyTorch's autograd in double precision, and their weights' gradients in
// Param::main_grad.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>
#include <set>
#include <thread>

#include "parvl/nn/functions.h"

namespace parvl {
namespace {

using at::Tensor;

at::Generator generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

Tensor random_tensor(at::IntArrayRef shape, uint64_t seed, at::ScalarType type = at::kDouble) {
  return at::empty(shape, at::kDouble).normal_(0, 1, generator(seed)).to(type);
}

Tensor ids_tensor(const std::vector<int64_t>& ids) { return at::tensor(ids, at::kLong); }

// max|g − r| / max|r|
double error(const Tensor& got, const Tensor& want) {
  EXPECT_EQ(got.sizes(), want.sizes());
  const double scale = std::max(want.abs().max().item<double>(), 1e-30);
  return (got.to(at::kDouble) - want).abs().max().item<double>() / scale;
}

// One operation, written twice.
struct Operation {
  std::vector<Tensor> inputs;  // double
  std::vector<std::vector<int64_t>> weight_shapes;
  std::function<Tensor(const std::vector<Tensor>& inputs, const std::vector<Param*>& weights)> ours;
  std::function<Tensor(const std::vector<Tensor>& inputs, const std::vector<Tensor>& weights)> reference;
};

struct Gradients {
  Tensor output;
  std::vector<Tensor> inputs, weights;
};

class FunctionsTest : public ::testing::Test {
 protected:
  void make_params(const Operation& op, at::ScalarType type) {
    table_ = std::make_unique<ParamTable>();
    params_.clear();
    for (size_t i = 0; i < op.weight_shapes.size(); ++i) {
      params_.push_back(table_->add(Module::kBackbone, "w" + std::to_string(i), op.weight_shapes[i]));
    }
    table_->allocate(type, at::kCPU);
    for (size_t i = 0; i < params_.size(); ++i) params_[i]->value.copy_(random_tensor(op.weight_shapes[i], 100 + i));
    train_all(type);
  }

  void train_all(at::ScalarType type) {
    for (Param* param : params_) {
      param->main_grad = at::zeros(param->shape, type == at::kDouble ? at::kDouble : at::kFloat);
    }
  }

  // Outputs and gradients of inputs; weights' gradients are added to main_grad.
  Gradients run(const Operation& op, at::ScalarType type, bool defer, bool train_inputs = true) {
    Gradients out;
    std::vector<Tensor> leaves;
    for (const Tensor& input : op.inputs) leaves.push_back(input.to(type).clone().requires_grad_(train_inputs));
    WeightGradQueue queue;
    queue.set_deferred(defer);
    {
      WeightGradScope scope(&queue);
      out.output = op.ours(leaves, params_);
    }
    if (out.output.requires_grad()) {
      torch::autograd::backward({out.output}, {upstream(out.output)});
    }
    if (defer) {
      for (Param* param : params_) {
        const double done = param->trainable() ? param->main_grad.abs().max().item<double>() : 0;
        EXPECT_EQ(done, 0) << "deferred work was done at once";
      }
      queue.run();
    }
    EXPECT_TRUE(queue.empty());
    for (const Tensor& leaf : leaves) out.inputs.push_back(leaf.grad());
    for (Param* param : params_) out.weights.push_back(param->main_grad);
    return out;
  }

  // The same by PyTorch's autograd from the same (rounded) values, in double.
  Gradients reference(const Operation& op, at::ScalarType type) {
    Gradients out;
    std::vector<Tensor> leaves, weights;
    for (const Tensor& input : op.inputs) leaves.push_back(input.to(type).to(at::kDouble).clone().requires_grad_(true));
    for (Param* param : params_) weights.push_back(param->value.to(at::kDouble).clone().requires_grad_(true));
    out.output = op.reference(leaves, weights);
    torch::autograd::backward({out.output}, {upstream(out.output).to(type).to(at::kDouble)});
    for (const Tensor& leaf : leaves) out.inputs.push_back(leaf.grad());
    for (const Tensor& weight : weights) out.weights.push_back(weight.grad());
    return out;
  }

  static Tensor upstream(const Tensor& output) {
    if (output.dim() == 0) return at::full({}, 1.5, output.options().requires_grad(false));
    return random_tensor(output.sizes(), 7, output.scalar_type());
  }

  static void expect_equal(const Gradients& got, const Gradients& want, double tolerance) {
    EXPECT_LE(error(got.output.detach(), want.output.detach()), tolerance) << "output";
    for (size_t i = 0; i < want.inputs.size(); ++i) {
      ASSERT_TRUE(got.inputs[i].defined()) << "input " << i << " got no gradient";
      EXPECT_LE(error(got.inputs[i], want.inputs[i]), tolerance) << "gradient of input " << i;
    }
    for (size_t i = 0; i < want.weights.size(); ++i) {
      EXPECT_LE(error(got.weights[i], want.weights[i]), tolerance) << "gradient of weight " << i;
    }
  }

  void check_double(const Operation& op) {
    SCOPED_TRACE("float64");
    make_params(op, at::kDouble);
    const Gradients want = reference(op, at::kDouble);
    expect_equal(run(op, at::kDouble, /*defer=*/false), want, 1e-12);
    train_all(at::kDouble);
    expect_equal(run(op, at::kDouble, /*defer=*/true), want, 1e-12);
    // A second micro batch adds.
    const Gradients twice = run(op, at::kDouble, false);
    for (size_t i = 0; i < twice.weights.size(); ++i) EXPECT_LE(error(twice.weights[i] / 2, want.weights[i]), 1e-12);
    check_frozen(op, want);
  }

  // Each weight frozen in turn, all frozen, and nothing before the operation trained.
  void check_frozen(const Operation& op, const Gradients& want) {
    for (size_t frozen = 0; frozen <= params_.size(); ++frozen) {
      for (const bool train_inputs : {true, false}) {
        SCOPED_TRACE(::testing::Message()
                     << "frozen weight " << frozen << (train_inputs ? "" : ", inputs without gradient"));
        train_all(at::kDouble);
        for (size_t i = 0; i < params_.size(); ++i) {
          if (frozen == params_.size() || i == frozen) params_[i]->main_grad = Tensor();
        }
        const Gradients got = run(op, at::kDouble, false, train_inputs);
        bool any = train_inputs && !op.inputs.empty();
        for (size_t i = 0; i < params_.size(); ++i) {
          EXPECT_EQ(params_[i]->main_grad.defined(), params_[i]->trainable());
          if (!params_[i]->trainable()) continue;
          any = true;
          EXPECT_LE(error(params_[i]->main_grad, want.weights[i]), 1e-12) << "gradient of weight " << i;
        }
        EXPECT_EQ(got.output.requires_grad(), any) << "a graph without need, or none where something trains";
        for (size_t i = 0; i < op.inputs.size() && train_inputs; ++i) {
          EXPECT_LE(error(got.inputs[i], want.inputs[i]), 1e-12) << "gradient of input " << i;
        }
      }
    }
  }

  void check_lower(const Operation& op, at::ScalarType type, double tolerance) {
    SCOPED_TRACE(at::toString(type));
    make_params(op, type);
    expect_equal(run(op, type, false), reference(op, type), tolerance);
  }

  void check(const Operation& op) {
    check_double(op);
    check_lower(op, at::kFloat, 1e-5);
    check_lower(op, at::kBFloat16, 0.02);
  }

  std::unique_ptr<ParamTable> table_;
  std::vector<Param*> params_;
};

TEST_F(FunctionsTest, Linear) {
  for (const int64_t rows : {1, 3, 37}) {
    SCOPED_TRACE(rows);
    check({{random_tensor({rows, 13}, 1)},
           {{9, 13}},
           [](auto& in, auto& w) { return linear(in[0], *w[0], nullptr); },
           [](auto& in, auto& w) { return at::linear(in[0], w[0]); }});
    check({{random_tensor({rows, 13}, 1)},
           {{9, 13}, {9}},
           [](auto& in, auto& w) { return linear(in[0], *w[0], w[1]); },
           [](auto& in, auto& w) { return at::linear(in[0], w[0], w[1]); }});
  }
}

TEST_F(FunctionsTest, LinearOverMoreDims) {
  check({{random_tensor({2, 5, 6}, 1)},
         {{4, 6}, {4}},
         [](auto& in, auto& w) { return linear(in[0], *w[0], w[1]); },
         [](auto& in, auto& w) { return at::linear(in[0], w[0], w[1]); }});
}

TEST_F(FunctionsTest, LinearOfATransposedInput) {
  check({{random_tensor({6, 5}, 1)},
         {{4, 6}},
         [](auto& in, auto& w) { return linear(in[0].t(), *w[0], nullptr); },
         [](auto& in, auto& w) { return at::linear(in[0].t(), w[0]); }});
}

TEST_F(FunctionsTest, EmbeddingWithRepeatedIds) {
  const Tensor ids = ids_tensor({3, 0, 3, 3, 6, 0});
  check({{},
         {{7, 5}},
         [ids](auto&, auto& w) { return embedding(ids, *w[0]); },
         [ids](auto&, auto& w) { return at::embedding(w[0], ids); }});
}

TEST_F(FunctionsTest, RmsNorm) {
  for (const double eps : {1e-6, 0.1}) {
    check({{random_tensor({7, 33}, 1)},
           {{33}},
           [eps](auto& in, auto& w) { return rms_norm(in[0], *w[0], eps); },
           [eps](auto& in, auto& w) { return in[0] * at::rsqrt(in[0].square().mean({-1}, true) + eps) * w[0]; }});
  }
}

TEST_F(FunctionsTest, RmsNormOfManyRowsAddsTheWeightsGradientInParts) {
  check({{random_tensor({700, 24}, 1)},
         {{24}},
         [](auto& in, auto& w) { return rms_norm(in[0], *w[0], 1e-6); },
         [](auto& in, auto& w) { return in[0] * at::rsqrt(in[0].square().mean({-1}, true) + 1e-6) * w[0]; }});
}

TEST_F(FunctionsTest, RmsNormOfATransposedInput) {
  check({{random_tensor({6, 9}, 1)},
         {{6}},
         [](auto& in, auto& w) { return rms_norm(in[0].t(), *w[0], 1e-6); },
         [](auto& in, auto& w) {
           const Tensor x = in[0].t();
           return x * at::rsqrt(x.square().mean({-1}, true) + 1e-6) * w[0];
         }});
}

TEST_F(FunctionsTest, LayerNorm) {
  check({{random_tensor({7, 33}, 1)},
         {{33}, {33}},
         [](auto& in, auto& w) { return layer_norm(in[0], *w[0], *w[1], 1e-5); },
         [](auto& in, auto& w) {
           const Tensor x = in[0] - in[0].mean({-1}, true);
           return x * at::rsqrt(x.square().mean({-1}, true) + 1e-5) * w[0] + w[1];
         }});
}

TEST_F(FunctionsTest, Swiglu) {
  check({{random_tensor({5, 11}, 1), random_tensor({5, 11}, 2)},
         {},
         [](auto& in, auto&) { return swiglu(in[0], in[1]); },
         [](auto& in, auto&) { return in[0] * at::sigmoid(in[0]) * in[1]; }});
}

TEST_F(FunctionsTest, QuickGelu) {
  check({{random_tensor({5, 11}, 1) * 3},
         {},
         [](auto& in, auto&) { return quick_gelu(in[0]); },
         [](auto& in, auto&) { return in[0] * at::sigmoid(in[0] * 1.702); }});
}

// The reference turns each head as complex numbers.
Tensor turn(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  const Tensor turned = at::complex(halves[0], halves[1]) * at::complex(cos, sin).unsqueeze(1);
  return at::cat({at::real(turned), at::imag(turned)}, -1);
}

TEST_F(FunctionsTest, Rotary) {
  const Tensor angles = random_tensor({6, 5}, 3) * 10;
  const auto ours = [angles](const Tensor& x) {
    const at::ScalarType type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    return rotary(x, angles.cos().to(type), angles.sin().to(type));
  };
  const auto reference = [angles](const Tensor& x) { return turn(x, angles.cos(), angles.sin()); };
  check({{random_tensor({6, 3, 10}, 1)},
         {},
         [ours](auto& in, auto&) { return ours(in[0]); },
         [reference](auto& in, auto&) { return reference(in[0]); }});
  // Queries and keys inside one wider tensor, as a vision block has them.
  check({{random_tensor({6, 9, 10}, 1)},
         {},
         [ours](auto& in, auto&) { return ours(in[0].narrow(1, 3, 6)); },
         [reference](auto& in, auto&) { return reference(in[0].narrow(1, 3, 6)); }});
  // Heads that do not lie together.
  check({{random_tensor({3, 6, 10}, 1)},
         {},
         [ours](auto& in, auto&) { return ours(in[0].transpose(0, 1)); },
         [reference](auto& in, auto&) { return reference(in[0].transpose(0, 1)); }});
}

Operation head_loss_operation(int64_t rows, int64_t width, int64_t vocab, double scale) {
  std::vector<int64_t> targets;
  for (int64_t i = 0; i < rows; ++i) targets.push_back((i * 7919) % vocab);
  const Tensor ids = ids_tensor(targets);
  return {{random_tensor({rows, width}, 1)},
          {{vocab, width}},
          [ids, scale](auto& in, auto& w) { return head_loss(in[0], *w[0], ids, scale); },
          [ids, scale](auto& in, auto& w) {
            return at::cross_entropy_loss(at::linear(in[0], w[0]), ids, {}, at::Reduction::Sum) * scale;
          }};
}

TEST_F(FunctionsTest, HeadLoss) { check(head_loss_operation(9, 6, 50, 0.125)); }

TEST_F(FunctionsTest, HeadLossOfSeveralChunks) {
  // One chunk is 2²⁴ / vocabulary rows: one of them and a part here.
  const Operation op = head_loss_operation(5, 2, 1 << 22, 0.25);
  make_params(op, at::kDouble);
  expect_equal(run(op, at::kDouble, false), reference(op, at::kDouble), 1e-12);
}

TEST_F(FunctionsTest, HeadLossWithoutRows) {
  const Operation op = head_loss_operation(0, 6, 50, 0.125);
  make_params(op, at::kDouble);
  const Gradients got = run(op, at::kDouble, false);
  EXPECT_TRUE(got.output.requires_grad());
  EXPECT_EQ(got.output.item<double>(), 0);
  EXPECT_EQ(got.inputs[0].sizes(), (at::IntArrayRef{0, 6}));
  EXPECT_EQ(params_[0]->main_grad.abs().max().item<double>(), 0);
}

TEST_F(FunctionsTest, NothingIsKeptWithoutGradMode) {
  make_params({{}, {{4, 6}, {4}}, {}, {}}, at::kFloat);
  at::NoGradGuard no_grad;
  WeightGradQueue queue;
  WeightGradScope scope(&queue);
  const Tensor x = random_tensor({2, 6}, 1, at::kFloat).requires_grad_(true);
  EXPECT_FALSE(linear(x, *params_[0], params_[1]).requires_grad());
  EXPECT_FALSE(embedding(ids_tensor({1}), *params_[0]).requires_grad());
  EXPECT_FALSE(head_loss(x, *params_[0], ids_tensor({1, 2}), 1).requires_grad());
}

// Serving reads a few rows through the matrix-vector kernel; it must give what training's product gives.
TEST_F(FunctionsTest, LinearWithoutGradientEqualsLinearWithIt) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kDouble, at::kHalf}) {
    for (int64_t rows = 1; rows <= 6; ++rows) {
      SCOPED_TRACE(::testing::Message() << at::toString(type) << ", " << rows << " rows");
      make_params({{}, {{21, 135}, {21}}, {}, {}}, type);
      const Tensor x = random_tensor({rows, 135}, 1, type);
      Tensor plain;
      {
        at::NoGradGuard no_grad;
        plain = linear(x, *params_[0], params_[1]);
      }
      const Tensor want =
          at::linear(x.to(at::kDouble), params_[0]->value.to(at::kDouble), params_[1]->value.to(at::kDouble));
      EXPECT_EQ(plain.scalar_type(), type);
      EXPECT_LE(error(plain, want), type == at::kDouble ? 1e-13 : type == at::kFloat ? 1e-6 : 0.01);
    }
  }
}

// A matrix's result does not depend on which others share its loop, nor on the threads.
TEST_F(FunctionsTest, LinearsEqualsLinearToTheBit) {
  at::NoGradGuard no_grad;
  const int threads = at::get_num_threads();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const int64_t rows : {1, 3, 7}) {
      SCOPED_TRACE(::testing::Message() << at::toString(type) << ", " << rows << " rows");
      make_params({{}, {{301, 135}, {301}, {7, 135}, {90, 135}}, {}, {}}, type);
      const Tensor x = random_tensor({rows, 135}, 1, type);
      at::set_num_threads(3);
      const auto together = linears(x, {{params_[0], params_[1]}, {params_[2], nullptr}, {params_[3], nullptr}});
      at::set_num_threads(1);
      EXPECT_TRUE(at::equal(together[0], linear(x, *params_[0], params_[1])));
      EXPECT_TRUE(at::equal(together[1], linear(x, *params_[2], nullptr)));
      EXPECT_TRUE(at::equal(together[2], linear(x, *params_[3], nullptr)));
    }
  }
  at::set_num_threads(threads);
}

// ATen's parallel_for is compiled into our files: without OpenMP there it would be a loop on one thread, unnoticed.
TEST(Parallel, LoopsUseTheThreadsThatWereAskedFor) {
  const int threads = at::get_num_threads();
  at::set_num_threads(2);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  at::parallel_for(0, 2, 1, [&](int64_t, int64_t) {
    std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  at::set_num_threads(threads);
  EXPECT_EQ(seen.size(), 2u);
}

}  // namespace
}  // namespace parvl
