// CPU kernels against plain loops in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <tuple>
#include <vector>

#include "parvl/base/rng.h"
#include "parvl/kernels/gemm_amx.h"
#include "parvl/kernels/gemm_bf16.h"
#include "parvl/kernels/gemm_widened.h"
#include "parvl/kernels/gemv.h"
#include "parvl/kernels/norm.h"
#include "parvl/kernels/paged_attention.h"
#include "parvl/kernels/rotary.h"

namespace parvl::kernels {
namespace {

// Largest error a sum of about a thousand terms near 1 may have, and the type's own rounding of the result.
template <typename T>
constexpr double kTolerance = 0;
template <>
constexpr double kTolerance<double> = 1e-13;
template <>
constexpr double kTolerance<float> = 1e-5;
template <>
constexpr double kTolerance<BFloat16> = 1.0 / 256;  // half a unit in the last of 8 bits

template <typename T>
std::vector<T> random_values(size_t count, uint64_t seed) {
  Rng rng(seed);
  std::vector<T> out(count);
  for (T& x : out) x = narrow<T>(static_cast<WideT<T>>(rng.normal()));
  return out;
}

template <typename T>
std::vector<double> widened(const std::vector<T>& values) {
  std::vector<double> out;
  for (const T& x : values) out.push_back(static_cast<double>(widen(x)));
  return out;
}

// |got − want| within the tolerance times (|want| + `scale`), everywhere.
template <typename T>
void expect_close(const std::vector<T>& got, const std::vector<double>& want, double scale) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const double wide = static_cast<double>(widen(got[i]));
    ASSERT_LE(std::abs(wide - want[i]), kTolerance<T> * (std::abs(want[i]) + scale))
        << "at " << i << ": " << wide << " for " << want[i];
  }
}

TEST(BFloat16, RoundsToNearestEvenAndKeepsSpecialValues) {
  const auto round = [](float x) { return widen(narrow<BFloat16>(x)); };
  EXPECT_EQ(round(1.0f), 1.0f);
  EXPECT_EQ(round(1.0f + 1.0f / 256), 1.0f);              // a tie goes to the even neighbour below
  EXPECT_EQ(round(1.0f + 3.0f / 256), 1.0f + 1.0f / 64);  // and above
  EXPECT_EQ(round(1.0f + 1.01f / 256), 1.0f + 1.0f / 128);
  EXPECT_EQ(round(-INFINITY), -INFINITY);
  EXPECT_TRUE(std::isnan(round(NAN)));
  EXPECT_TRUE(std::isnan(round(std::bit_cast<float>(0x7f800001u))));  // a NaN whose upper half alone is infinity
  EXPECT_EQ(round(3.4e38f), INFINITY);
}

// `multiply`: gemv or a kernel of its form.
template <typename T, typename Multiply>
void check_gemv(Multiply multiply, int64_t rows, int64_t n, int64_t k, bool with_bias) {
  SCOPED_TRACE(::testing::Message() << rows << " rows, " << n << " × " << k << (with_bias ? " with bias" : ""));
  const auto x = random_values<float>(static_cast<size_t>(rows * k), 1);
  const auto w = random_values<T>(static_cast<size_t>(n * k), 2), bias = random_values<T>(static_cast<size_t>(n), 3);
  const T untouched = narrow<T>(-77);
  std::vector<T> y(static_cast<size_t>(rows * n), untouched);
  const int64_t middle = n / 3;  // two threads' shares
  multiply(x.data(), w.data(), with_bias ? bias.data() : nullptr, y.data(), rows, n, k, 0, middle);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = middle; o < n; ++o)
      ASSERT_EQ(widen(y[static_cast<size_t>(r * n + o)]), widen(untouched)) << "written outside its share";
  }
  multiply(x.data(), w.data(), with_bias ? bias.data() : nullptr, y.data(), rows, n, k, middle, n);
  std::vector<double> want;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < n; ++o) {
      double sum = with_bias ? static_cast<double>(widen(bias[static_cast<size_t>(o)])) : 0;
      for (int64_t i = 0; i < k; ++i) {
        sum += static_cast<double>(x[static_cast<size_t>(r * k + i)]) *
               static_cast<double>(widen(w[static_cast<size_t>(o * k + i)]));
      }
      want.push_back(sum);
    }
  }
  expect_close(y, want, 1);
}

// `multiply(x, w, bias, y, rows, n, begin, end)` for `most` rows and fewer: a row's result is the same to the bit in
// whatever company, close to the exact sum, and the outputs may be shared out in any way.
template <typename Multiply>
void check_bf16_rows(Multiply multiply, int64_t least, int64_t most, int64_t n, int64_t k) {
  const auto x = random_values<BFloat16>(static_cast<size_t>(most * k), 1);
  const auto w = random_values<BFloat16>(static_cast<size_t>(n * k), 2);
  const auto bias = random_values<BFloat16>(static_cast<size_t>(n), 3);
  for (const BFloat16* offsets : {static_cast<const BFloat16*>(nullptr), bias.data()}) {
    std::vector<double> want;
    for (int64_t r = 0; r < most; ++r) {
      for (int64_t o = 0; o < n; ++o) {
        double sum = offsets != nullptr ? static_cast<double>(widen(offsets[o])) : 0;
        for (int64_t i = 0; i < k; ++i) {
          sum += static_cast<double>(widen(x[static_cast<size_t>(r * k + i)])) *
                 static_cast<double>(widen(w[static_cast<size_t>(o * k + i)]));
        }
        want.push_back(sum);
      }
    }
    std::vector<BFloat16> all(static_cast<size_t>(most * n));
    multiply(x.data(), w.data(), offsets, all.data(), most, n, k, 0, n);
    expect_close(all, want, 1);
    for (int64_t rows = least; rows < most; ++rows) {
      SCOPED_TRACE(::testing::Message() << rows << " rows, k " << k);
      const BFloat16 untouched = narrow<BFloat16>(-77);
      std::vector<BFloat16> y(static_cast<size_t>(rows * n), untouched);
      multiply(x.data(), w.data(), offsets, y.data(), rows, n, k, 0, n / 3);  // two threads' shares
      for (size_t i = 0; i < y.size(); ++i) {
        ASSERT_EQ(y[i].bits, static_cast<int64_t>(i) % n < n / 3 ? all[i].bits : untouched.bits);
      }
      multiply(x.data(), w.data(), offsets, y.data(), rows, n, k, n / 3, n);
      for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(y[i].bits, all[i].bits);
    }
  }
}

TEST(GemmBf16, EveryRowCountAndOddSizes) {
  if (!has_bf16_dot()) GTEST_SKIP() << "this processor has no AVX512_BF16";
  for (const int64_t k : {1, 31, 32, 33, 200, 1027}) check_bf16_rows(gemm_bf16, kGemmBf16MinRows, 40, 13, k);
}

TEST(GemmAmx, EveryRowCountAndOddSizes) {
  if (!has_amx()) GTEST_SKIP() << "this processor has no matrix tiles (AMX), or the kernel does not give them";
  const auto multiply = [](const BFloat16* x, const BFloat16* w, const BFloat16* bias, BFloat16* y, int64_t rows,
                           int64_t n, int64_t k, int64_t begin, int64_t end) {
    gemm_amx(pack_for_amx(x, rows, k).data(), w, bias, y, rows, n, k, begin, end);
  };
  for (const int64_t k : {32, 64, 1024}) {
    for (const int64_t n : {1, 13, 16, 31, 48, 100}) check_bf16_rows(multiply, 1, 67, n, k);
  }
}

TEST(WritePages, PutsEachHeadOfARowIntoItsPlace) {
  const std::string rows = "aabbccddeeff";  // 3 rows of 2 heads of 2 bytes
  std::string pages(2 * 2 * 4 * 2, '.');    // 2 blocks of 2 heads of 4 tokens
  const int32_t places[] = {5, 0, 3};
  write_pages(rows.data(), pages.data(), places, 3, {4, 2, 2});
  EXPECT_EQ(pages, "cc....eedd....ff..aa......bb....");
}

TEST(Gemv, EveryRowCountAndOddSizes) {
  for (int64_t rows = 1; rows <= kGemvMaxRows; ++rows) {
    for (const int64_t k : {1, 7, 63, 64, 65, 200, 1027}) {
      for (const bool with_bias : {false, true}) {
        check_gemv<float>(gemv<float>, rows, 11, k, with_bias);
        check_gemv<BFloat16>(gemv<BFloat16>, rows, 11, k, with_bias);
      }
    }
  }
}

TEST(GemmWidened, EveryRowCountAndOddSizes) {
  for (const int64_t rows : {1, 4, 5, 7, 8, 19, 64}) {
    for (const int64_t k : {1, 7, 8, 9, 200, 1027}) {
      for (const bool with_bias : {false, true}) {
        check_gemv<float>(gemm_widened<float>, rows, 11, k, with_bias);
        check_gemv<BFloat16>(gemm_widened<BFloat16>, rows, 11, k, with_bias);
      }
    }
  }
}

// In whatever company a row has the same result to the bit.
TEST(GemmWidened, ARowDoesNotDependOnTheOthers) {
  const int64_t rows = 13, n = 9, k = 77;
  const auto x = random_values<float>(static_cast<size_t>(rows * k), 1);
  const auto w = random_values<BFloat16>(static_cast<size_t>(n * k), 2);
  std::vector<BFloat16> all(static_cast<size_t>(rows * n)), one(static_cast<size_t>(n));
  gemm_widened<BFloat16>(x.data(), w.data(), nullptr, all.data(), rows, n, k, 0, n);
  for (int64_t r = 0; r < rows; ++r) {
    gemm_widened<BFloat16>(x.data() + r * k, w.data(), nullptr, one.data(), 1, n, k, 0, n);
    for (int64_t o = 0; o < n; ++o) {
      ASSERT_EQ(one[static_cast<size_t>(o)].bits, all[static_cast<size_t>(r * n + o)].bits) << r << " " << o;
    }
  }
}

template <typename T>
void check_rms_norm(int64_t rows, int64_t size) {
  SCOPED_TRACE(::testing::Message() << rows << " × " << size);
  using Acc = WideT<T>;
  const double eps = 1e-5;
  const size_t count = static_cast<size_t>(rows * size);
  const auto x = random_values<T>(count, 1), weight = random_values<T>(static_cast<size_t>(size), 2),
             dy = random_values<T>(count, 3);
  std::vector<T> y(count), dx(count);
  std::vector<Acc> rstd(static_cast<size_t>(rows)), dweight(static_cast<size_t>(size), Acc{10});
  const int64_t middle = rows / 2;
  for (const auto& [begin, end] : {std::pair{int64_t{0}, middle}, std::pair{middle, rows}}) {
    rms_norm<T>(x.data(), weight.data(), y.data(), rstd.data(), eps, size, begin, end);
    rms_norm_backward<T>(dy.data(), x.data(), weight.data(), rstd.data(), dx.data(), dweight.data(), size, begin, end);
  }

  const auto wide_x = widened(x), wide_w = widened(weight), wide_dy = widened(dy);
  std::vector<double> want_y(count), want_rstd, want_dx(count), want_dw(static_cast<size_t>(size), 10);  // it adds
  for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
    const size_t n = static_cast<size_t>(size), at = r * n;
    double square = 0, dot = 0;
    for (size_t i = 0; i < n; ++i) square += wide_x[at + i] * wide_x[at + i];
    const double scale = 1 / std::sqrt(square / static_cast<double>(n) + eps);
    want_rstd.push_back(scale);
    for (size_t i = 0; i < n; ++i) {
      want_y[at + i] = wide_x[at + i] * scale * wide_w[i];
      want_dw[i] += wide_dy[at + i] * wide_x[at + i] * scale;
      dot += wide_dy[at + i] * wide_w[i] * wide_x[at + i];
    }
    // d(x·s)/dx with s = (mean(x²) + eps)^(−1/2): s·g − s³·x·(g·x)/n
    for (size_t i = 0; i < n; ++i) {
      want_dx[at + i] =
          scale * wide_dy[at + i] * wide_w[i] - scale * scale * scale * wide_x[at + i] * dot / static_cast<double>(n);
    }
  }
  expect_close(y, want_y, 1);
  expect_close(rstd, want_rstd, 1);
  expect_close(dx, want_dx, 1);
  expect_close(dweight, want_dw, 1);

  std::vector<T> again(count);
  rms_norm_backward<T>(dy.data(), x.data(), weight.data(), rstd.data(), again.data(), nullptr, size, 0, rows);
  EXPECT_EQ(widened(again), widened(dx)) << "a frozen weight changes the input's gradient";
}

TEST(RmsNorm, ForwardAndBackward) {
  for (const int64_t size : {1, 5, 31, 32, 33, 128, 515}) {
    check_rms_norm<float>(5, size);
    check_rms_norm<double>(5, size);
    check_rms_norm<BFloat16>(5, size);
  }
}

template <typename T>
void check_rotary(int64_t rows, int64_t heads, int64_t dim, int64_t stride) {
  SCOPED_TRACE(::testing::Message() << rows << " × " << heads << " × " << dim << ", stride " << stride);
  using Acc = WideT<T>;
  const auto x = random_values<T>(static_cast<size_t>(rows * stride), 1);
  const int64_t half = dim / 2;
  std::vector<Acc> cos, sin;
  for (int64_t i = 0; i < rows * half; ++i) {
    cos.push_back(static_cast<Acc>(std::cos(0.37 * static_cast<double>(i))));
    sin.push_back(static_cast<Acc>(std::sin(0.37 * static_cast<double>(i))));
  }
  for (const bool inverse : {false, true}) {
    std::vector<T> y(static_cast<size_t>(rows * heads * dim));
    const int64_t middle = rows / 2;
    rotary<T>(x.data(), stride, cos.data(), sin.data(), y.data(), heads, dim, inverse, 0, middle);
    rotary<T>(x.data(), stride, cos.data(), sin.data(), y.data(), heads, dim, inverse, middle, rows);
    std::vector<double> want(y.size());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < half; ++i) {
          const double c = cos[static_cast<size_t>(r * half + i)],
                       s = sin[static_cast<size_t>(r * half + i)] * (inverse ? -1.0 : 1.0);
          const size_t from = static_cast<size_t>(r * stride + h * dim + i),
                       to = static_cast<size_t>((r * heads + h) * dim + i);
          const double low = static_cast<double>(widen(x[from])),
                       high = static_cast<double>(widen(x[from + static_cast<size_t>(half)]));
          want[to] = low * c - high * s;
          want[to + static_cast<size_t>(half)] = high * c + low * s;
        }
      }
    }
    expect_close(y, want, 1);
    if (stride != heads * dim) continue;
    std::vector<T> back(y.size());
    rotary<T>(y.data(), stride, cos.data(), sin.data(), back.data(), heads, dim, !inverse, 0, rows);
    expect_close(back, widened(x), 6);  // twice rounded, once at the size of the other half
  }
}

TEST(Rotary, BothWaysAndRowsOfSomethingWider) {
  for (const int64_t dim : {2, 10, 16, 64, 130}) {
    for (const int64_t extra : {int64_t{0}, 3 * dim, int64_t{7}}) {
      check_rotary<float>(5, 3, dim, 3 * dim + extra);
      check_rotary<double>(5, 3, dim, 3 * dim + extra);
      check_rotary<BFloat16>(5, 3, dim, 3 * dim + extra);
    }
  }
}

struct PagedCase {
  int64_t heads, kv_heads, dim, block_size, length;
};

// softmax(q kᵀ / √dim) v of head `h`, straight from the definition.
std::vector<double> attend(const std::vector<double>& q, const std::vector<double>& keys,
                           const std::vector<double>& values, const std::vector<int32_t>& table, const PagedCase& c,
                           int64_t h) {
  const int64_t kv = h / (c.heads / c.kv_heads);
  const auto at = [&](int64_t t) {
    return static_cast<size_t>(
        ((table[static_cast<size_t>(t / c.block_size)] * c.kv_heads + kv) * c.block_size + t % c.block_size) * c.dim);
  };
  std::vector<double> weights, out(static_cast<size_t>(c.dim), 0.0);
  double total = 0;
  for (int64_t t = 0; t < c.length; ++t) {
    double score = 0;
    for (int64_t i = 0; i < c.dim; ++i)
      score += q[static_cast<size_t>(h * c.dim + i)] * keys[at(t) + static_cast<size_t>(i)];
    weights.push_back(std::exp(score / std::sqrt(static_cast<double>(c.dim))));
    total += weights.back();
  }
  for (int64_t t = 0; t < c.length; ++t) {
    for (size_t i = 0; i < out.size(); ++i) out[i] += weights[static_cast<size_t>(t)] / total * values[at(t) + i];
  }
  return out;
}

template <typename T>
void check_paged(const PagedCase& c) {
  SCOPED_TRACE(::testing::Message() << c.heads << "/" << c.kv_heads << " heads × " << c.dim << ", blocks of "
                                    << c.block_size << ", length " << c.length);
  const int64_t used = (c.length + c.block_size - 1) / c.block_size, blocks = 2 * used + 1;
  std::vector<int32_t> table;  // scattered: every second block, from the last
  for (int64_t i = 0; i < used; ++i) table.push_back(static_cast<int32_t>(blocks - 1 - 2 * i));
  const size_t page_values = static_cast<size_t>(blocks * c.kv_heads * c.block_size * c.dim);
  auto keys = random_values<T>(page_values, 1), values = random_values<T>(page_values, 2);
  const auto q = random_values<T>(static_cast<size_t>(c.heads * c.dim), 3);
  std::vector<double> want;
  for (int64_t h = 0; h < c.heads; ++h) {
    const auto head = attend(widened(q), widened(keys), widened(values), table, c, h);
    want.insert(want.end(), head.begin(), head.end());
  }
  // What lies behind the sequence in its last block must not be read.
  for (int64_t kv = 0; kv < c.kv_heads; ++kv) {
    for (int64_t t = c.length; t < used * c.block_size; ++t) {
      for (int64_t i = 0; i < c.dim; ++i) {
        const size_t at =
            static_cast<size_t>(((table.back() * c.kv_heads + kv) * c.block_size + t % c.block_size) * c.dim + i);
        keys[at] = values[at] = narrow<T>(static_cast<WideT<T>>(NAN));
      }
    }
  }
  Pages<T> pages{keys.data(), values.data(), table.data(), c.block_size, c.kv_heads, c.dim, c.length};
  std::vector<T> out(q.size());
  const int64_t middle = c.heads / 2;
  paged_attention_decode<T>(q.data(), pages, out.data(), c.heads, 0, middle);
  paged_attention_decode<T>(q.data(), pages, out.data(), c.heads, middle, c.heads);
  expect_close(out, want, 1);
}

TEST(PagedAttention, OddLengthsGroupedHeadsAndScatteredBlocks) {
  for (const int64_t length : {1, 2, 15, 16, 17, 33, 100}) {
    for (const auto& [heads, kv_heads] : {std::pair{4, 4}, std::pair{6, 2}, std::pair{5, 1}}) {
      for (const int64_t dim : {2, 16, 18, 80}) {
        const PagedCase c{heads, kv_heads, dim, 16, length};
        check_paged<float>(c);
        check_paged<double>(c);
        check_paged<BFloat16>(c);
      }
    }
  }
}

TEST(PagedAttention, LimitsOfBlockAndHeadSize) {
  for (const int64_t block : {1, 3, 64}) {
    check_paged<float>({2, 1, 512, block, 67});
    check_paged<double>({2, 1, 512, block, 67});
    check_paged<BFloat16>({2, 1, 512, block, 67});
  }
}

TEST(PagedAttention, ScoresFarApartDoNotOverflow) {
  const int64_t dim = 4;
  const std::vector<float> q(4, 100.0f), values = {1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  const std::vector<float> keys = {-90, -90, -90, -90, 90, 90, 90, 90, -80, -80, -80, -80};  // scores ∓18,000
  const std::vector<int32_t> table = {0, 1, 2};
  const Pages<float> pages{keys.data(), values.data(), table.data(), 1, 1, dim, 3};
  std::vector<float> out(4);
  paged_attention_decode<float>(q.data(), pages, out.data(), 1, 0, 1);
  EXPECT_EQ(out, std::vector<float>(4, 2.0f));
}

}  // namespace
}  // namespace parvl::kernels
