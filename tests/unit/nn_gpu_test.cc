// What training does otherwise on a GPU in bfloat16: attention of grouped heads over ragged sequences with its
// gradients, and weight gradients added in float32. Against float64 on the CPU, of the same rounded values.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "parvl/nn/attention.h"
#include "parvl/nn/device.h"
#include "parvl/nn/segment.h"

namespace parvl {
namespace {

using at::Tensor;

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto device = select_device("cuda");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = *device;
  }
  // Values that bfloat16 holds exactly.
  static Tensor random_tensor(at::IntArrayRef shape, uint64_t seed) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    return at::empty(shape, at::kDouble).normal_(0, 1, generator).to(at::kBFloat16).to(at::kDouble);
  }
  Tensor on_gpu(const Tensor& x) const { return x.to(device_, at::kBFloat16); }
  // max|g − r| / max|r|
  static double error(const Tensor& got, const Tensor& want) {
    EXPECT_EQ(got.sizes(), want.sizes());
    return ((got.to(at::kCPU, at::kDouble) - want).abs().max() / want.abs().max()).item<double>();
  }
  at::Device device_ = at::kCPU;
};

// The output, and the gradients of queries, keys and values.
std::vector<Tensor> attend(std::vector<Tensor> qkv, const Tensor& dy, const std::vector<int64_t>& lengths,
                           bool causal) {
  for (Tensor& x : qkv) x.requires_grad_(true);
  const Tensor y = packed_attention(qkv[0], qkv[1], qkv[2], SeqLayout(lengths, dy.device()), causal);
  torch::autograd::backward({y}, {dy});
  return {y.detach(), qkv[0].grad(), qkv[1].grad(), qkv[2].grad()};
}

TEST_F(GpuTest, AttentionAndItsGradients) {
  constexpr int64_t kHeads = 4, kKeyHeads = 2;
  uint64_t seed = 0;
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{7, 130, 1, 5}, {64, 64, 64}}) {
    int64_t total = 0;
    for (const int64_t length : lengths) total += length;
    for (const int64_t dim : {64, 80, 128}) {
      for (const bool causal : {false, true}) {
        const std::vector<Tensor> qkv = {random_tensor({total, kHeads, dim}, ++seed),
                                         random_tensor({total, kKeyHeads, dim}, ++seed),
                                         random_tensor({total, kKeyHeads, dim}, ++seed)};
        const Tensor dy = random_tensor({total, kHeads, dim}, ++seed);
        const auto got = attend({on_gpu(qkv[0]), on_gpu(qkv[1]), on_gpu(qkv[2])}, on_gpu(dy), lengths, causal);
        const auto want = attend(qkv, dy, lengths, causal);
        for (size_t i = 0; i < want.size(); ++i) {
          EXPECT_LT(error(got[i], want[i]), 2e-2) << "tensor " << i << ", heads of " << dim << ", causal " << causal;
        }
      }
    }
  }
}

TEST_F(GpuTest, WeightGradientsAddUpInFloat32) {
  constexpr int64_t kRows = 100, kIn = 48, kOut = 40;
  ParamTable table;
  Param* weight = table.add(Module::kBackbone, "w", {kOut, kIn});
  table.allocate(at::kBFloat16, device_);
  weight->value.copy_(on_gpu(random_tensor({kOut, kIn}, 1)));
  weight->main_grad = at::zeros({kOut, kIn}, at::TensorOptions().dtype(at::kFloat).device(device_));
  Tensor want = at::zeros({kOut, kIn}, at::kDouble);
  for (uint64_t step = 0; step < 3; ++step) {
    const Tensor x = random_tensor({kRows, kIn}, 10 + step), dy = random_tensor({kRows, kOut}, 20 + step);
    Segment segment({"linear",
                     {"w"},
                     [&](const Bundle& in) {
                       return Bundle{{"y", linear(in.at("x"), *weight, nullptr)}};
                     }},
                    {});
    segment.forward({{"x", on_gpu(x)}});
    segment.backward_input({{"y", on_gpu(dy)}});
    want.addmm_(dy.t(), x);
    EXPECT_LT(error(weight->main_grad, want), 1e-5) << "after micro batch " << step;
  }
}

}  // namespace
}  // namespace parvl
