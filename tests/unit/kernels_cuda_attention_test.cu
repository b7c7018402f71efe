// The GPU's attention over pages against plain loops in float64. Without a GPU each test skips and says so.
#include <algorithm>

#include "parvl/kernels/decode_attention.h"
#include "parvl/kernels/prefill_attention.h"
#include "tests/unit/kernels_cuda_fixture.cuh"

namespace parvl::kernels {
namespace {

struct PagedCase {
  int64_t heads, kv_heads, dim, block_size;
  struct Sequence {
    int32_t begin, count;  // positions that were there, new ones
  };
  std::vector<Sequence> sequences;
};

// Where everything of a case lies.
struct PagedLayout {
  int64_t rows = 0, blocks = 1, stride = 1;
  std::vector<int32_t> table, places;
  std::vector<PrefillTile> tiles;
};
PagedLayout make_layout(const PagedCase& c) {
  PagedLayout out;
  for (const auto& s : c.sequences) {
    out.stride = std::max<int64_t>(out.stride, (s.begin + s.count + c.block_size - 1) / c.block_size);
  }
  out.table.resize(c.sequences.size() * out.stride);
  for (size_t i = 0; i < c.sequences.size(); ++i) {
    const auto& s = c.sequences[i];
    int32_t* table = out.table.data() + i * out.stride;
    for (int64_t b = 0; b * c.block_size < s.begin + s.count; ++b) table[b] = static_cast<int32_t>(out.blocks++);
    for (int32_t p = s.begin; p < s.begin + s.count; ++p) {
      out.places.push_back(static_cast<int32_t>(table[p / c.block_size] * c.block_size + p % c.block_size));
    }
    for (int32_t j = 0; j < s.count; j += kPrefillTile) {
      out.tiles.push_back({static_cast<int32_t>(i), static_cast<int32_t>(out.rows) + j, s.begin + j,
                           std::min(kPrefillTile, s.count - j)});
    }
    out.rows += s.count;
  }
  return out;
}

// What no position has reached may hold anything.
void poison_unused(const PagedCase& c, const PagedLayout& l, std::vector<Bf16>& pages) {
  for (size_t i = 0; i < c.sequences.size(); ++i) {
    const int64_t last = c.sequences[i].begin + c.sequences[i].count - 1;
    const int64_t block = l.table[i * l.stride + last / c.block_size];
    for (int64_t k = 0; k < c.kv_heads; ++k) {
      const int64_t page = (block * c.kv_heads + k) * c.block_size;
      std::fill(pages.begin() + (page + last % c.block_size + 1) * c.dim, pages.begin() + (page + c.block_size) * c.dim,
                __float2bfloat16(NAN));
    }
  }
}

// softmax(q kᵀ / √D) v for one query over the first `count` positions of sequence `i`, whose keys are in the pages.
std::vector<double> plain_attention(const PagedCase& c, const PagedLayout& l, size_t i, int64_t kv_head, int64_t count,
                                    const std::vector<double>& query, const std::vector<Bf16>& keys,
                                    const std::vector<Bf16>& values) {
  std::vector<double> sums(static_cast<size_t>(c.dim), 0.0);
  double total = 0;
  for (int64_t p = 0; p < count; ++p) {
    const int64_t block = l.table[i * l.stride + p / c.block_size];
    const int64_t at = ((block * c.kv_heads + kv_head) * c.block_size + p % c.block_size) * c.dim;
    double score = 0;
    for (int64_t d = 0; d < c.dim; ++d) score += query[d] * wide(keys[at + d]);
    const double w = std::exp(score / std::sqrt(c.dim));
    total += w;
    for (int64_t d = 0; d < c.dim; ++d) sums[d] += w * wide(values[at + d]);
  }
  for (double& x : sums) x /= total;
  return sums;
}

// Random angles of rows of `half` frequencies.
struct Angles {
  std::vector<float> cos, sin;
  Angles(Rng& rng, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double angle = rng.uniform() * 6;
      cos.push_back(static_cast<float>(std::cos(angle)));
      sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  // Dim d of a head after its row's turn.
  double turn(const Bf16* head, int64_t row, int64_t d, int64_t half) const {
    const double c = cos[row * half + d % half], s = sin[row * half + d % half];
    return d < half ? wide(head[d]) * c - wide(head[d + half]) * s : wide(head[d]) * c + wide(head[d - half]) * s;
  }
};

// Sequences of one new token each; a count of 0 is a row that is none.
void check_decode(const PagedCase& c, int64_t splits) {
  SCOPED_TRACE(testing::Message() << c.heads << "/" << c.kv_heads << " heads of " << c.dim << ", " << splits
                                  << " splits");
  Rng rng(static_cast<uint64_t>(c.heads * 1000 + c.dim));
  const int64_t T = static_cast<int64_t>(c.sequences.size()), D = c.dim, N = c.heads, K = c.kv_heads, half = D / 2;
  const int64_t width = (N + 2 * K) * D;
  const PagedLayout l = make_layout(c);
  const size_t cache = static_cast<size_t>(l.blocks * K * c.block_size * D);
  std::vector<int32_t> lengths, rows;
  for (int64_t t = 0; t < T; ++t) {
    lengths.push_back(c.sequences[t].count == 0 ? 0 : c.sequences[t].begin + 1);
    rows.push_back(static_cast<int32_t>(T - 1 - t));  // rows in another order than sequences
  }
  const Angles angles(rng, T * half);
  std::vector<Bf16> old_keys = random_bf16(rng, cache, 1), old_values = random_bf16(rng, cache, 1);
  Array<Bf16> qkv(random_bf16(rng, static_cast<size_t>(T * width), 1)), keys(old_keys), values(old_values),
      out(static_cast<size_t>(T * N * D));
  Array<float> d_cos(angles.cos), d_sin(angles.sin);
  Array<uint8_t> partial(static_cast<size_t>(decode_attention_partial_bytes(T, K, D, splits)));
  Array<int32_t> d_table(l.table), d_lengths(lengths), d_rows(rows),
      finished(std::vector<int32_t>(static_cast<size_t>(T * K), 0));
  for (int i = 0; i < 2; ++i) {  // twice: the counters are as they were
    CUDA_OK(decode_attention(
        {qkv.get(), d_cos.get(), d_sin.get(), keys.get(), values.get(), d_table.get(), l.stride, d_lengths.get(),
         d_rows.get(), T, N, K, D, c.block_size, splits, partial.get(), finished.get(), out.get()},
        nullptr));
    CUDA_OK(cudaDeviceSynchronize());
  }
  for (const int32_t n : finished.read()) EXPECT_EQ(n, 0);

  const std::vector<Bf16> all = out.read(), new_keys = keys.read(), new_values = values.read();
  std::vector<double> wanted;
  std::vector<Bf16> got;
  size_t written = 0, changed = 0, place = 0;
  for (int64_t t = 0; t < T; ++t) {
    if (lengths[t] == 0) continue;  // its output is nobody's
    const int64_t r = rows[t];
    const auto rotated = [&](int64_t head, int64_t d) {
      return angles.turn(qkv.host().data() + r * width + head * D, r, d, half);
    };
    const int64_t at = l.places[place++];
    for (int64_t k = 0; k < K; ++k) {
      const int64_t page = (at / c.block_size * K + k) * c.block_size + at % c.block_size;
      for (int64_t d = 0; d < D; ++d) {
        EXPECT_NEAR(wide(new_keys[page * D + d]), rotated(N + k, d), 0.02);
        EXPECT_EQ(wide(new_values[page * D + d]), wide(qkv.host()[r * width + (N + K + k) * D + d]));
      }
    }
    written += static_cast<size_t>(K * D);
    for (int64_t n = 0; n < N; ++n) {
      std::vector<double> query;
      for (int64_t d = 0; d < D; ++d) query.push_back(rotated(n, d));
      const auto row =
          plain_attention(c, l, static_cast<size_t>(t), n / (N / K), lengths[t], query, new_keys, new_values);
      wanted.insert(wanted.end(), row.begin(), row.end());
      got.insert(got.end(), all.begin() + (r * N + n) * D, all.begin() + (r * N + n + 1) * D);
    }
  }
  EXPECT_LT(error_of(got, wanted), 1e-2);  // the rounded query moves every score
  for (size_t i = 0; i < cache; ++i) changed += wide(new_keys[i]) != wide(old_keys[i]);
  EXPECT_LE(changed, written);  // nothing else in the cache
}

// One new token after each of these lengths less one; 0: none.
PagedCase decode_case(int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size,
                      const std::vector<int32_t>& lengths) {
  PagedCase c = {heads, kv_heads, dim, block_size, {}};
  for (const int32_t n : lengths)
    c.sequences.push_back(n == 0 ? PagedCase::Sequence{0, 0} : PagedCase::Sequence{n - 1, 1});
  return c;
}

TEST(DecodeAttention, EqualsPlainLoops) {
  if (!has_gpu()) GTEST_SKIP() << "no GPU on this machine";
  check_decode(decode_case(12, 2, 128, 16, {1, 2, 16, 17, 255, 256, 257, 500, 0, 1000}), 8);
  check_decode(decode_case(28, 4, 128, 16, {3000}), 16);
  check_decode(decode_case(28, 4, 128, 32, {7, 300, 0, 1}), 1);
  check_decode(decode_case(14, 2, 64, 48, {1, 100, 257, 2000}), 4);
  for (int64_t group = 1; group <= 8; ++group) {
    check_decode(decode_case(group * 2, 2, 64, 16, {600, 33}), 3);
    check_decode(decode_case(group, 1, 128, 16, {600, 33}), 3);
  }
}

void check_prefill(const PagedCase& c) {
  SCOPED_TRACE(testing::Message() << c.heads << "/" << c.kv_heads << " heads of " << c.dim);
  Rng rng(static_cast<uint64_t>(c.heads * 7 + c.dim));
  const int64_t D = c.dim, N = c.heads, K = c.kv_heads, half = D / 2, width = (N + 2 * K) * D;
  const PagedLayout l = make_layout(c);
  const size_t cache = static_cast<size_t>(l.blocks * K * c.block_size * D);
  const Angles angles(rng, l.rows * half);
  std::vector<Bf16> old_keys = random_bf16(rng, cache, 1), old_values = random_bf16(rng, cache, 1);
  poison_unused(c, l, old_keys);
  poison_unused(c, l, old_values);
  Array<Bf16> qkv(random_bf16(rng, static_cast<size_t>(l.rows * width), 1)), keys(old_keys), values(old_values),
      q(static_cast<size_t>(l.rows * N * D)), out(static_cast<size_t>(l.rows * N * D));
  Array<float> d_cos(angles.cos), d_sin(angles.sin);
  Array<int32_t> d_table(l.table), d_places(l.places);
  Array<PrefillTile> d_tiles(l.tiles);
  const DecodeAttentionShape shape = {N, K, D, c.block_size};
  CUDA_OK(store_rows(
      {qkv.get(), d_cos.get(), d_sin.get(), d_places.get(), keys.get(), values.get(), q.get(), l.rows, shape},
      nullptr));
  CUDA_OK(prefill_attention({q.get(), keys.get(), values.get(), d_table.get(), l.stride, d_tiles.get(),
                             static_cast<int64_t>(l.tiles.size()), shape, out.get()},
                            nullptr));
  CUDA_OK(cudaDeviceSynchronize());

  const std::vector<Bf16> new_keys = keys.read(), new_values = values.read();
  const auto rotated = [&](int64_t r, int64_t head, int64_t d) {
    return angles.turn(qkv.host().data() + r * width + head * D, r, d, half);
  };
  std::vector<double> wanted;
  int64_t r = 0;
  for (size_t i = 0; i < c.sequences.size(); ++i) {
    for (int32_t j = 0; j < c.sequences[i].count; ++j, ++r) {
      for (int64_t k = 0; k < K; ++k) {
        const int64_t place = l.places[r], page = (place / c.block_size * K + k) * c.block_size + place % c.block_size;
        for (int64_t d = 0; d < D; d += 5) {
          EXPECT_NEAR(wide(new_keys[page * D + d]), rotated(r, N + k, d), 0.02);
          EXPECT_EQ(wide(new_values[page * D + d]), wide(qkv.host()[r * width + (N + K + k) * D + d]));
        }
      }
      for (int64_t n = 0; n < N; ++n) {
        std::vector<double> query;
        for (int64_t d = 0; d < D; ++d) query.push_back(rotated(r, n, d));
        const auto row =
            plain_attention(c, l, i, n / (N / K), c.sequences[i].begin + j + 1, query, new_keys, new_values);
        wanted.insert(wanted.end(), row.begin(), row.end());
      }
    }
  }
  EXPECT_LT(error_of(out.read(), wanted), 1e-2);
}

TEST(PrefillAttention, EqualsPlainLoops) {
  if (!has_gpu()) GTEST_SKIP() << "no GPU on this machine";
  check_prefill({4, 2, 128, 16, {{0, 1}, {0, 16}, {0, 17}, {0, 200}, {5, 3}, {300, 65}, {16, 64}}});
  check_prefill({7, 1, 128, 32, {{0, 100}, {31, 33}}});
  check_prefill({14, 2, 64, 48, {{0, 130}, {100, 5}}});
  check_prefill({3, 3, 64, 16, {{0, 70}}});
}

}  // namespace
}  // namespace parvl::kernels
