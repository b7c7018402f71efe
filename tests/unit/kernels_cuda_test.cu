// The GPU kernels against plain loops in float64. Without a GPU each test skips and says so.
#include <memory>

#include "parvl/exec/sampler.h"
#include "parvl/kernels/decode_linear.h"
#include "parvl/kernels/decode_sample.h"
#include "tests/unit/kernels_cuda_fixture.cuh"

namespace parvl::kernels {
namespace {

struct LinearCase {
  int64_t tokens, in;
  std::vector<int64_t> rows;
  bool norm, bias, residual, swiglu;
};

void check_linear(const LinearCase& c) {
  SCOPED_TRACE(testing::Message() << c.tokens << " tokens, in " << c.in << ", rows " << c.rows[0] << ", norm " << c.norm
                                  << ", bias " << c.bias << ", residual " << c.residual << ", swiglu " << c.swiglu);
  Rng rng(static_cast<uint64_t>(c.tokens * 131 + c.in));
  int64_t total = 0;
  for (const int64_t r : c.rows) total += r;
  if (c.swiglu) total = c.rows[0];
  Array<Bf16> x(random_bf16(rng, c.tokens * c.in, 1)), norm(random_bf16(rng, c.in, 1)),
      residual(random_bf16(rng, c.tokens * total, 1)), y(static_cast<size_t>(c.tokens * total));
  std::vector<std::unique_ptr<Array<Bf16>>> weights, biases;
  DecodeLinear a;
  a.matrices = static_cast<int>(c.rows.size());
  for (size_t i = 0; i < c.rows.size(); ++i) {
    weights.push_back(std::make_unique<Array<Bf16>>(random_bf16(rng, c.rows[i] * c.in, 1 / std::sqrt(c.in))));
    biases.push_back(std::make_unique<Array<Bf16>>(random_bf16(rng, c.rows[i], 1)));
    a.weight[i] = weights[i]->get();
    a.bias[i] = c.bias ? biases[i]->get() : nullptr;
    a.rows[i] = c.rows[i];
  }
  a.x = x.get();
  a.tokens = c.tokens;
  a.in = c.in;
  a.norm = c.norm ? norm.get() : nullptr;
  a.eps = 1e-6f;
  a.residual = c.residual ? residual.get() : nullptr;
  a.swiglu = c.swiglu;
  a.y = y.get();
  CUDA_OK(decode_linear(a, nullptr));
  CUDA_OK(cudaDeviceSynchronize());

  std::vector<double> wanted(static_cast<size_t>(c.tokens * total));
  for (int64_t t = 0; t < c.tokens; ++t) {
    double squares = 0;
    for (int64_t k = 0; k < c.in; ++k) squares += std::pow(wide(x.host()[t * c.in + k]), 2);
    const double scale = c.norm ? 1 / std::sqrt(squares / c.in + 1e-6) : 1;
    std::vector<double> products;
    for (size_t m = 0; m < c.rows.size(); ++m) {
      for (int64_t r = 0; r < c.rows[m]; ++r) {
        double sum = 0;
        for (int64_t k = 0; k < c.in; ++k) {
          sum += wide(x.host()[t * c.in + k]) * (c.norm ? wide(norm.host()[k]) : 1) *
                 wide(weights[m]->host()[r * c.in + k]);
        }
        products.push_back(sum * scale + (c.bias ? wide(biases[m]->host()[r]) : 0));
      }
    }
    for (int64_t r = 0; r < total; ++r) {
      double v = products[r];
      if (c.swiglu) v = v / (1 + std::exp(-v)) * products[c.rows[0] + r];
      if (c.residual) v += wide(residual.host()[t * total + r]);
      wanted[t * total + r] = v;
    }
  }
  EXPECT_LT(error_of(y.read(), wanted), kTolerance);
}

TEST(DecodeLinear, EqualsPlainLoops) {
  if (!has_gpu()) GTEST_SKIP() << "no GPU on this machine";
  for (const int64_t tokens : {1, 3, 8}) {
    check_linear({tokens, 1536, {256, 64, 48}, true, true, false, false});
    check_linear({tokens, 272, {16}, false, false, true, false});
    check_linear({tokens, 512, {320, 320}, true, false, false, true});
    check_linear({tokens, 16, {48, 48}, false, true, false, true});
    check_linear({tokens, 144, {8464}, false, false, true, false});
    check_linear({tokens, 80, {8480, 8480}, true, true, false, true});
  }
}

TEST(DecodeLinear, RefusesWhatItCannotTake) {
  if (!has_gpu()) GTEST_SKIP() << "no GPU on this machine";
  Array<Bf16> any(static_cast<size_t>(4096));
  DecodeLinear good;
  good.weight[0] = good.x = any.get();
  good.y = any.get();
  good.rows[0] = 16;
  good.in = 32;
  good.tokens = 1;
  const auto refused = [&](auto change) {
    DecodeLinear a = good;
    change(a);
    return decode_linear(a, nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refused([](DecodeLinear& a) { a.tokens = kDecodeLinearTokens + 1; }));
  EXPECT_TRUE(refused([](DecodeLinear& a) { a.tokens = 0; }));
  EXPECT_TRUE(refused([](DecodeLinear& a) { a.in = 24; }));
  EXPECT_TRUE(refused([](DecodeLinear& a) { a.rows[0] = 20; }));
  EXPECT_TRUE(refused([](DecodeLinear& a) { a.swiglu = true; }));
  EXPECT_TRUE(refused([](DecodeLinear& a) { a.matrices = 4; }));
}

// The sampler of exec/ on the same rows.
TEST(DecodeSample, GivesTheTokensAndLogprobsOfTheSampler) {
  if (!has_gpu()) GTEST_SKIP() << "no GPU on this machine";
  constexpr int64_t kRows = 48;
  for (const int64_t vocab : {8, 1000, 151936}) {
    Rng rng(static_cast<uint64_t>(vocab));
    Array<Bf16> logits(random_bf16(rng, static_cast<size_t>(kRows * vocab), 3));
    std::vector<SampleRow> how(kRows);
    for (int64_t r = 0; r < kRows; ++r) {
      const double temperatures[] = {0, 0.05, 0.7, 1, 2};
      how[r] = {temperatures[r % 5], rng.next(), static_cast<int64_t>(rng.below(100000)), r % 3 != 0};
    }
    Array<SampleRow> params(how);
    Array<SampledRow> out(static_cast<size_t>(kRows));
    Array<uint8_t> partial(static_cast<size_t>(decode_sample_partial_bytes(kRows)));
    Array<int32_t> finished(std::vector<int32_t>(kRows, 0));
    for (int i = 0; i < 2; ++i) {
      CUDA_OK(
          decode_sample(logits.get(), kRows, vocab, params.get(), out.get(), partial.get(), finished.get(), nullptr));
      CUDA_OK(cudaDeviceSynchronize());
    }
    const std::vector<SampledRow> got = out.read();
    for (int64_t r = 0; r < kRows; ++r) {
      SamplingParams sampling;
      sampling.temperature = how[r].temperature;
      sampling.seed = how[r].seed;
      sampling.logprobs = true;
      Sampler sampler(sampling, {}, std::vector<TokenId>(static_cast<size_t>(how[r].position)));
      std::vector<float> row;
      for (int64_t v = 0; v < vocab; ++v) row.push_back(static_cast<float>(wide(logits.host()[r * vocab + v])));
      const auto wanted = sampler.choose(row);
      ASSERT_TRUE(wanted.ok());
      EXPECT_EQ(got[r].token, wanted->token_id) << "row " << r << " of " << vocab;
      EXPECT_NEAR(got[r].logprob, how[r].logprob != 0 ? wanted->logprob.logprob : 0, 1e-5);
      EXPECT_EQ(got[r].broken, 0);
    }
  }
}

TEST(DecodeSample, SaysWhichRowsAreBroken) {
  if (!has_gpu()) GTEST_SKIP() << "no GPU on this machine";
  const int64_t vocab = 512;
  std::vector<Bf16> values(static_cast<size_t>(5 * vocab), __float2bfloat16(1.0f));
  values[1 * vocab + 300] = __float2bfloat16(NAN);
  values[2 * vocab + 511] = __float2bfloat16(INFINITY);
  for (int64_t v = 0; v < vocab; ++v) values[3 * vocab + v] = __float2bfloat16(-INFINITY);
  values[4 * vocab + 7] = __float2bfloat16(-INFINITY);
  Array<Bf16> logits(values);
  for (const double temperature : {0.0, 1.0}) {
    Array<SampleRow> params(std::vector<SampleRow>(5, SampleRow{temperature, 1, 1, 1}));
    Array<SampledRow> out(static_cast<size_t>(5));
    Array<uint8_t> partial(static_cast<size_t>(decode_sample_partial_bytes(5)));
    Array<int32_t> finished(std::vector<int32_t>(5, 0));
    CUDA_OK(decode_sample(logits.get(), 5, vocab, params.get(), out.get(), partial.get(), finished.get(), nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    const std::vector<SampledRow> got = out.read();
    for (int i = 0; i < 5; ++i) EXPECT_EQ(got[i].broken != 0, i >= 1 && i <= 3) << "row " << i;
    EXPECT_NE(got[4].token, 7);
  }
}

}  // namespace
}  // namespace parvl::kernels
