// Attention over the paged cache equals attention over the whole sequence, however the sequence is cut.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include "parvl/exec/kv_cache.h"
#include "parvl/kernels/paged_attention.h"

namespace parvl {
namespace {

using at::Tensor;

BackboneSpec spec_of(int64_t layers, int64_t heads, int64_t kv_heads, int64_t head_dim) {
  BackboneSpec spec;
  spec.layers = layers;
  spec.heads = heads;
  spec.kv_heads = kv_heads;
  spec.head_dim = head_dim;
  return spec;
}

struct Inputs {
  Tensor q, k, v;
};

Inputs random_inputs(const BackboneSpec& spec, int64_t tokens, uint64_t seed, at::ScalarType type) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto make = [&](int64_t heads) {
    return at::empty({tokens, heads, spec.head_dim}, at::kFloat).normal_(0, 1, generator).to(type);
  };
  return {make(spec.heads), make(spec.kv_heads), make(spec.kv_heads)};
}

// Angles of zero.
RotaryTable no_turn(const Tensor& q, int64_t tokens) {
  const auto options = at::TensorOptions().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  return {at::ones({tokens, q.size(2) / 2}, options), at::zeros({tokens, q.size(2) / 2}, options)};
}

// Feeds the sequence in parts of these lengths; the outputs of each layer, joined.
std::vector<Tensor> attend_in_parts(CachedAttention& attention, const std::vector<Inputs>& layers,
                                    const std::vector<int64_t>& parts) {
  std::vector<std::vector<Tensor>> outputs(layers.size());
  int64_t begin = attention.length();
  for (const int64_t count : parts) {
    attention.begin(count);
    for (size_t layer = 0; layer < layers.size(); ++layer) {
      const auto part = [&](const Tensor& x) { return x.narrow(0, begin, count); };
      const Inputs& in = layers[layer];
      outputs[layer].push_back(
          attention.attend(static_cast<int64_t>(layer), part(in.q), part(in.k), part(in.v), no_turn(in.q, count)));
    }
    attention.commit();
    begin += count;
    EXPECT_EQ(attention.length(), begin);
  }
  std::vector<Tensor> joined;
  for (const auto& parts_of_layer : outputs) joined.push_back(at::cat(parts_of_layer, 0));
  return joined;
}

double tolerance(at::ScalarType type) {
  return type == at::kDouble ? 1e-13 : type == at::kFloat ? 1e-5 : type == at::kHalf ? 4e-3 : 2e-2;
}

void check(const BackboneSpec& spec, at::ScalarType type, int64_t tokens, const std::vector<int64_t>& parts) {
  SCOPED_TRACE(::testing::Message() << at::toString(type) << ", " << spec.heads << "/" << spec.kv_heads << " heads × "
                                    << spec.head_dim << ", " << tokens << " tokens in parts "
                                    << testing::PrintToString(parts));
  std::vector<Inputs> layers;
  for (int64_t layer = 0; layer < spec.layers; ++layer) {
    layers.push_back(random_inputs(spec, tokens, static_cast<uint64_t>(layer) + 1, type));
  }
  KvPages pages(spec, type, at::kCPU);
  CachedAttention attention(pages);
  const auto got = attend_in_parts(attention, layers, parts);
  const SeqLayout layout({tokens}, at::kCPU);
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto wide = [](const Tensor& x) { return x.to(at::kDouble); };
    const Tensor want =
        packed_attention(wide(layers[i].q), wide(layers[i].k), wide(layers[i].v), layout, /*causal=*/true);
    EXPECT_EQ(got[i].scalar_type(), type);
    EXPECT_LE((wide(got[i]) - want).abs().max().item<double>(), tolerance(type)) << "layer " << i;
  }
}

TEST(CachedAttention, AnyCutOfThePromptAndDecodeEqualTheWhole) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto& [heads, kv_heads] : {std::pair{4, 4}, std::pair{6, 2}, std::pair{3, 1}}) {
      const BackboneSpec spec = spec_of(2, heads, kv_heads, 10);
      check(spec, type, 37, {37});
      check(spec, type, 37, {36, 1});
      check(spec, type, 37, {16, 16, 5});
      check(spec, type, 37, {15, 2, 1, 1, 18});
      check(spec, type, 37, std::vector<int64_t>(37, 1));  // token by token from the start
      check(spec, type, 1, {1});
    }
  }
}

TEST(CachedAttention, EveryFirstCut) {
  const BackboneSpec spec = spec_of(1, 4, 2, 8);
  for (int64_t first = 1; first < 40; ++first) check(spec, at::kFloat, 40, {first, 40 - first});
}

TEST(CachedAttention, HeadsLargerThanTheKernelTakes) {
  check(spec_of(1, 2, 1, kernels::kPagedMaxDim), at::kFloat, 20, {18, 1, 1});
  check(spec_of(1, 2, 1, kernels::kPagedMaxDim + 2), at::kFloat, 20, {18, 1, 1});
}

TEST(KvPages, GrowthKeepsWhatIsThere) {
  const BackboneSpec spec = spec_of(2, 2, 2, 4);
  KvPages pages(spec, at::kFloat, at::kCPU);
  EXPECT_EQ(pages.blocks(), 0);
  pages.reserve(3);
  EXPECT_EQ(pages.blocks(), 3);
  EXPECT_EQ(pages.keys(0).sizes(), (at::IntArrayRef{3, 2, KvPages::kBlockSize, 4}));
  Tensor keys = pages.keys(1), values = pages.values(1);
  keys.fill_(5);
  values.fill_(6);
  pages.reserve(2);
  EXPECT_TRUE(pages.keys(1).is_same(keys)) << "reserving less changes nothing";
  pages.reserve(4);
  EXPECT_EQ(pages.blocks(), 6) << "growth doubles";
  EXPECT_TRUE(pages.keys(1).narrow(0, 0, 3).eq(5).all().item<bool>());
  EXPECT_TRUE(pages.values(1).narrow(0, 0, 3).eq(6).all().item<bool>());
  pages.reserve(100);
  EXPECT_EQ(pages.blocks(), 100);
}

TEST(KvPages, ManyTokensGrowAFewTimes) {
  const BackboneSpec spec = spec_of(1, 1, 1, 2);
  KvPages pages(spec, at::kFloat, at::kCPU);
  CachedAttention attention(pages);
  const auto inputs = random_inputs(spec, 1, 1, at::kFloat);
  int growths = 0;
  for (int64_t i = 0, blocks = 0; i < 2000; ++i) {
    attention.begin(1);
    growths += pages.blocks() != blocks;
    blocks = pages.blocks();
    attention.attend(0, inputs.q, inputs.k, inputs.v, no_turn(inputs.q, inputs.q.size(0)));
    attention.commit();
  }
  EXPECT_GE(pages.blocks() * KvPages::kBlockSize, 2000);
  EXPECT_LE(growths, 8);
}

// A part that was begun but never committed (a failed step) leaves the cache as it was.
TEST(CachedAttention, AnUncommittedPartCanBeRepeated) {
  const BackboneSpec spec = spec_of(1, 4, 2, 8);
  const std::vector<Inputs> in = {random_inputs(spec, 20, 1, at::kDouble)};
  KvPages pages(spec, at::kDouble, at::kCPU);
  CachedAttention attention(pages);
  attend_in_parts(attention, in, {10});
  const auto other = random_inputs(spec, 7, 9, at::kDouble);
  attention.begin(7);
  attention.attend(0, other.q, other.k, other.v, no_turn(other.q, other.q.size(0)));
  const Tensor got = attend_in_parts(attention, in, {10})[0];
  const Tensor want = packed_attention(in[0].q, in[0].k, in[0].v, SeqLayout({20}, at::kCPU), true);
  EXPECT_TRUE(at::allclose(got, want.narrow(0, 10, 10), 1e-12, 1e-12));
}

}  // namespace
}  // namespace parvl
