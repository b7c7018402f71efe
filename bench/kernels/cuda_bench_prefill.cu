// Rows of the kernels that take many tokens: attention of a prompt's chunk, storing its keys and values, and the
// elementwise operations of the decoder, the vision encoder and training.
#include "bench/kernels/cuda_bench.cuh"
#include "parvl/kernels/elementwise.h"
#include "parvl/kernels/prefill_attention.h"

namespace parvl::kernels {
namespace {

constexpr int kCalls = 10;
constexpr double kBeyondCache = 300e6;

// Value d of a head at `x`, turned by its row's angles.
__device__ double turned(const Bf16* x, const float* cos, const float* sin, int64_t d, int64_t half) {
  const double c = cos[d % half], s = sin[d % half];
  return d < half ? wide(x, d) * c - wide(x, d + half) * s : wide(x, d) * c + wide(x, d - half) * s;
}

// Cosines and sines of some rows' angles.
struct Angles {
  Array<float> cos, sin;
  static Angles make(int64_t rows, int64_t half) {
    std::vector<float> c, s;
    for (int64_t i = 0; i < rows * half; ++i) {
      c.push_back(std::cos(static_cast<float>(i % 1013)));
      s.push_back(std::sin(static_cast<float>(i % 1013)));
    }
    return {Array<float>(c), Array<float>(s)};
  }
};

struct Heads {
  const char* model;
  DecodeAttentionShape shape;
};

std::vector<int32_t> shuffled_blocks(int64_t count) {
  std::vector<int32_t> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(i * 7919 % count);
  return out;
}

void bench_store(const Bench& bench, const Heads& heads, int64_t rows) {
  const auto [N, K, D, size] = heads.shape;
  const int64_t blocks = (rows + size - 1) / size, width = (N + 2 * K) * D;
  const size_t cache = static_cast<size_t>(blocks * K * size * D);
  const std::vector<int32_t> table = shuffled_blocks(blocks);
  std::vector<int32_t> places;
  for (int64_t i = 0; i < rows; ++i)
    places.push_back(table[i / size] * static_cast<int32_t>(size) + static_cast<int32_t>(i % size));
  const Array<int32_t> d_places(places);
  const Angles angles = Angles::make(rows, D / 2);
  const Rotating qkv(static_cast<size_t>(rows * width), 1, kBeyondCache);
  const auto keys = random_values(cache, 1), values = random_values(cache, 1),
             q = random_values(static_cast<size_t>(rows * N * D), 1);
  const auto args = [&](int i) {
    return StoreRows{qkv[i], angles.cos.get(), angles.sin.get(), d_places.get(), keys.get(), values.get(), q.get(),
                     rows,   heads.shape};
  };
  const double us =
      time_us(bench.stream, kCalls, [&](int i) { check(store_rows(args(i), bench.stream), "store_rows"); });
  const StoreRows last = args(kCalls - 1);
  const double query_error = error_of(q.get(), q.size(), [last, width] __device__(size_t i) {
    const int64_t D = last.shape.dim, row = i / (last.shape.heads * D), head = i / D % last.shape.heads, half = D / 2;
    return turned(static_cast<const Bf16*>(last.qkv) + row * width + head * D, last.cos + row * half,
                  last.sin + row * half, i % D, half);
  });
  const Array<int32_t> d_rows = [&] {
    std::vector<int32_t> row_of(static_cast<size_t>(blocks * size), -1);
    for (int64_t i = 0; i < rows; ++i) row_of[places[i]] = static_cast<int32_t>(i);
    return Array<int32_t>(row_of);
  }();
  const int32_t* row_of = d_rows.get();
  const double key_error = error_of(keys.get(), cache, [last, width, row_of] __device__(size_t i) {
    const auto [N, K, D, size] = last.shape;
    const int64_t row = row_of[static_cast<int64_t>(i) / (K * size * D) * size + i / D % size];
    if (row < 0) return wide(last.keys, i);
    const int64_t head = N + static_cast<int64_t>(i) / (size * D) % K, half = D / 2;
    return turned(static_cast<const Bf16*>(last.qkv) + row * width + head * D, last.cos + row * half,
                  last.sin + row * half, i % D, half);
  });
  bench.memory_row("store rows " + std::string(heads.model) + ", " + std::to_string(rows) + " tokens",
                   std::max(query_error, key_error), us, 2.0 * 2 * static_cast<double>(rows * width));
}

// Value `index` of the output for one sequence, in float64.
__device__ double prefill_value(const PrefillAttention& a, size_t index) {
  const int64_t N = a.shape.heads, K = a.shape.kv_heads, D = a.shape.dim, size = a.shape.block_size;
  const int64_t d = static_cast<int64_t>(index) % D, n = static_cast<int64_t>(index) / D % N,
                row = static_cast<int64_t>(index) / D / N, k = n / (N / K);
  const auto* q = static_cast<const Bf16*>(a.q) + (row * N + n) * D;
  return attention_value(q, a.keys, a.values, D, d, a.tiles[0].position + row + 1,
                         [&](int64_t p) { return ((a.block_table[p / size] * K + k) * size + p % size) * D; });
}

// A chunk of `count` new tokens after `before`.
void bench_attention(const Bench& bench, const Heads& heads, int64_t before, int64_t count) {
  const auto [N, K, D, size] = heads.shape;
  const int64_t blocks = (before + count + size - 1) / size;
  const size_t cache = static_cast<size_t>(blocks * K * size * D);
  const Rotating keys(cache, 1, kBeyondCache / 2), values(cache, 1, kBeyondCache / 2);
  const Array<int32_t> table(shuffled_blocks(blocks));
  std::vector<PrefillTile> tiles;
  for (int64_t i = 0; i < count; i += kPrefillTile) {
    tiles.push_back({0, static_cast<int32_t>(i), static_cast<int32_t>(before + i),
                     static_cast<int32_t>(std::min<int64_t>(kPrefillTile, count - i))});
  }
  const Array<PrefillTile> d_tiles(tiles);
  const auto q = random_values(static_cast<size_t>(count * N * D), 1),
             out = random_values(static_cast<size_t>(count * N * D), 1);
  const auto args = [&](int i) {
    return PrefillAttention{
        q.get(),     keys[i],  values[i], table.get(), blocks, d_tiles.get(), static_cast<int64_t>(tiles.size()),
        heads.shape, out.get()};
  };
  const double us = time_us(bench.stream, kCalls,
                            [&](int i) { check(prefill_attention(args(i), bench.stream), "prefill_attention"); });
  const PrefillAttention last = args(kCalls - 1);
  const double error = error_of(out.get(), out.size(), [last] __device__(size_t i) { return prefill_value(last, i); });
  const double pairs = static_cast<double>(count) * (static_cast<double>(before) + static_cast<double>(count + 1) / 2);
  bench.math_row("prefill attention " + std::string(heads.model) + ", " + std::to_string(count) + " after " +
                     std::to_string(before),
                 error, us, 4.0 * static_cast<double>(N * D) * pairs);
}

// An elementwise operation with `count` values a result: `reads` arrays of them, one after another, to `writes` such.
struct Elementwise {
  std::string name;
  int64_t count;
  int reads, writes;
  std::function<int(const Bf16* in, Bf16* out)> launch;
  double more_bytes = 0;  // read beside
};

// wanted(in, i): value i of the results in float64.
template <typename F>
void bench_elementwise(const Bench& bench, const Elementwise& op, F wanted) {
  const size_t in_values = static_cast<size_t>(op.reads * op.count), out_values = op.writes * op.count;
  const double all = static_cast<double>(in_values + out_values), bytes = 2 * all;
  const Rotating in(in_values, 2, kBeyondCache * static_cast<double>(in_values) / all),
      out(out_values, 1, kBeyondCache * static_cast<double>(out_values) / all);
  const int calls = std::max(kCalls, in.size());
  const double us = time_us(bench.stream, calls, [&](int i) { check(op.launch(in[i], out[i]), op.name.c_str()); });
  const Bf16* last = in[calls - 1];
  const double error =
      error_of(out[calls - 1], out_values, [last, wanted] __device__(size_t i) { return wanted(last, i); });
  bench.memory_row(op.name, error, us, bytes + op.more_bytes);
}

__device__ double sigmoid(double x) { return 1 / (1 + exp(-x)); }

void bench_activations(const Bench& bench, const std::string& model, int64_t columns) {
  const CudaElementwise& kernels = kCudaElementwise;
  constexpr Element kType = Element::kBFloat16;
  const int64_t rows = 2048, count = rows * columns;
  bench_elementwise(bench,
                    {"swiglu " + model + ", 2048 tokens", count, 2, 1,
                     [=, &kernels, &bench](const Bf16* in, Bf16* out) {  // gate and up stand beside each other
                       return kernels.swiglu(kType, in, in + columns, 2 * columns, out, rows, columns, bench.stream);
                     }},
                    [columns] __device__(const Bf16* in, size_t i) {
                      const Bf16* row = in + static_cast<int64_t>(i) / columns * 2 * columns;
                      const double g = wide(row, i % columns);
                      return g * sigmoid(g) * wide(row, columns + i % columns);
                    });
  bench_elementwise(
      bench,
      {"swiglu backward " + model + ", 2048 tokens", count, 3, 2,
       [=, &kernels, &bench](const Bf16* in, Bf16* out) {
         return kernels.swiglu_backward(kType, in, in + count, in + 2 * count, out, out + count, count, bench.stream);
       }},
      [count] __device__(const Bf16* in, size_t i) {
        const int64_t at = static_cast<int64_t>(i) % count;
        const double d = wide(in, at), g = wide(in, count + at), s = sigmoid(g);
        return static_cast<int64_t>(i) >= count ? d * g * s : d * wide(in, 2 * count + at) * s * (1 + g * (1 - s));
      });
}

// Of 16 images of 1,024 patches.
void bench_encoder(const Bench& bench) {
  const CudaElementwise& kernels = kCudaElementwise;
  constexpr Element kType = Element::kBFloat16;
  const int64_t rows = 16 * 1024, heads = 16, dim = 80, half = dim / 2, count = rows * 5120;
  const Angles angles = Angles::make(rows, half);
  const float *cos = angles.cos.get(), *sin = angles.sin.get();
  bench_elementwise(bench,
                    {"rotary encoder, 16384 patches", rows * heads * dim, 1, 1,
                     [=, &kernels, &bench](const Bf16* in, Bf16* out) {
                       return kernels.rotary(kType, in, heads * dim, cos, sin, out, rows, heads, dim, false,
                                             bench.stream);
                     },
                     8.0 * static_cast<double>(rows * half)},
                    [=] __device__(const Bf16* in, size_t i) {
                      const int64_t row = static_cast<int64_t>(i) / (heads * dim);
                      return turned(in + static_cast<int64_t>(i) / dim * dim, cos + row * half, sin + row * half,
                                    static_cast<int64_t>(i) % dim, half);
                    });
  bench_elementwise(bench,
                    {"quick gelu encoder, 16384 patches", count, 1, 1,
                     [=, &kernels, &bench](const Bf16* in, Bf16* out) {
                       return kernels.quick_gelu(kType, in, out, count, bench.stream);
                     }},
                    [] __device__(const Bf16* in, size_t i) {
                      const double x = wide(in, i);
                      return x * sigmoid(1.702 * x);
                    });
  bench_elementwise(bench,
                    {"quick gelu backward encoder, 16384 patches", count, 2, 1,
                     [=, &kernels, &bench](const Bf16* in, Bf16* out) {
                       return kernels.quick_gelu_backward(kType, in, in + count, out, count, bench.stream);
                     }},
                    [count] __device__(const Bf16* in, size_t i) {
                      const double x = wide(in, count + i), s = sigmoid(1.702 * x);
                      return wide(in, i) * s * (1 + 1.702 * x * (1 - s));
                    });
}

}  // namespace

void bench_prefill(const Bench& bench) {
  for (const Heads& heads : {Heads{"2B", {12, 2, 128, 16}}, Heads{"7B", {28, 4, 128, 16}}}) {
    bench_store(bench, heads, 2048);
    bench_attention(bench, heads, 0, 320);
    bench_attention(bench, heads, 0, 2048);
    bench_attention(bench, heads, 2048, 2048);
  }
  bench_activations(bench, "2B", 8960);
  bench_activations(bench, "7B", 18944);
  bench_encoder(bench);
}

}  // namespace parvl::kernels
