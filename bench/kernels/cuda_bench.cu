// The GPU's kernels on the shapes of Qwen2-VL-2B and -7B, each against cuBLAS or what this GPU can do at most. A line a
// kernel and shape: largest error against float64 (in parts of the largest value), microseconds, TB/s of what it must
// read and write or TFLOP/s, and the ratio to the library. Run on a GPU: build/bench/cuda_bench
#include "bench/kernels/cuda_bench.cuh"
#include "parvl/kernels/decode_attention.h"
#include "parvl/kernels/decode_linear.h"
#include "parvl/kernels/decode_sample.h"

namespace parvl::kernels {

__global__ void fill_kernel(Bf16* to, size_t count, float scale, uint32_t seed) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    to[i] = __float2bfloat16((static_cast<float>(x & 0xffff) / 32768.0f - 1.0f) * scale);
  }
}

Array<Bf16> random_values(size_t count, float scale) {
  static uint32_t seed = 1;
  Array<Bf16> out(count);
  fill_kernel<<<1024, 256>>>(out.get(), count, scale, seed++ * 977);
  check(cudaDeviceSynchronize(), "fill");
  return out;
}

Rotating::Rotating(size_t count, float scale, double bytes_of_all) {
  const double bytes = 2.0 * static_cast<double>(count);
  const int copies = std::clamp(static_cast<int>(bytes_of_all / bytes), 2, 64);
  for (int i = 0; i < copies; ++i) arrays_.push_back(random_values(count, scale));
}

double time_us(cudaStream_t stream, int calls, const std::function<void(int)>& call) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  call(0);  // libraries set themselves up
  check(cudaStreamSynchronize(stream), "first call");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < calls; ++i) call(i);
  check(cudaStreamEndCapture(stream, &graph), "end of capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  std::vector<double> times;
  for (int i = 0; i < 25; ++i) {
    cudaEventRecord(start, stream);
    check(cudaGraphLaunch(exec, stream), "launch");
    cudaEventRecord(stop, stream);
    check(cudaEventSynchronize(stop), "graph");
    float ms = 0;
    cudaEventElapsedTime(&ms, start, stop);
    if (i >= 5) times.push_back(ms * 1e3 / calls);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  return times[times.size() / 2];
}

namespace {

void print_row(const std::string& name, double error, double us, double rate, const char* unit) {
  std::printf("%-48s %8.1e %9.2f us %8.2f %-7s", name.c_str(), error, us, rate, unit);
}

}  // namespace

void Bench::memory_row(const std::string& name, double error, double us, double bytes, double library_us) const {
  const double tb_s = bytes / us * 1e-6;
  print_row(name, error, us, tb_s, "TB/s");
  if (library_us > 0) {
    std::printf(" %5.2fx cuBLAS (%.2f us)\n", library_us / us, library_us);
  } else {
    std::printf(" %5.2f  of a copy's\n", tb_s / copy_tb_s);
  }
}

void Bench::math_row(const std::string& name, double error, double us, double flops) const {
  const double tflop_s = flops / us * 1e-6;
  print_row(name, error, us, tflop_s, "TFLOP/s");
  std::printf(" %5.2f  of cuBLAS's\n", tflop_s / matrix_tflop_s);
}

void Bench::multiply(const Bf16* weight, const Bf16* x, Bf16* y, int64_t rows, int64_t columns, int64_t in) const {
  const float one = 1, zero = 0;
  check(cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(rows), static_cast<int>(columns),
                     static_cast<int>(in), &one, weight, CUDA_R_16BF, static_cast<int>(in), x, CUDA_R_16BF,
                     static_cast<int>(in), &zero, y, CUDA_R_16BF, static_cast<int>(rows), CUBLAS_COMPUTE_32F,
                     CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
}

namespace {

struct Shape {
  const char* name;
  int64_t in;
  std::vector<int64_t> rows;
  bool norm, residual, swiglu;
};

// One value of what `a` computes, in float64.
__device__ double linear_value(const DecodeLinear& a, size_t index) {
  int64_t width = 0;
  for (int m = 0; m < (a.swiglu ? 1 : a.matrices); ++m) width += a.rows[m];
  const int64_t token = static_cast<int64_t>(index) / width;
  int64_t row = static_cast<int64_t>(index) % width;
  int matrix = 0;
  while (row >= a.rows[matrix]) row -= a.rows[matrix++];
  double sums[2] = {}, squares = 0;
  for (int64_t k = 0; k < a.in; ++k) {
    const double x = wide(a.x, token * a.in + k), scaled = a.norm == nullptr ? x : x * wide(a.norm, k);
    squares += x * x;
    sums[0] += scaled * wide(a.weight[matrix], row * a.in + k);
    if (a.swiglu) sums[1] += scaled * wide(a.weight[1], row * a.in + k);
  }
  const double scale = a.norm == nullptr ? 1 : rsqrt(squares / static_cast<double>(a.in) + a.eps);
  double y = sums[0] * scale;
  if (a.swiglu) y = y / (1 + exp(-y)) * sums[1] * scale;
  return a.residual == nullptr ? y : y + wide(a.residual, static_cast<int64_t>(index));
}

void bench_linear(const Bench& bench, const Shape& s, int64_t tokens) {
  int64_t total = 0;
  for (const int64_t r : s.rows) total += r;
  const double bytes = 2.0 * static_cast<double>(total * s.in);
  const Rotating weights(static_cast<size_t>(total * s.in), 0.02f, 300e6);
  const auto x = random_values(static_cast<size_t>(tokens * s.in), 1), norm = random_values(s.in, 1),
             residual = random_values(static_cast<size_t>(tokens * total), 1),
             y = random_values(static_cast<size_t>(tokens * total), 1);
  const auto args = [&](int i) {
    DecodeLinear a;
    a.matrices = static_cast<int>(s.rows.size());
    Bf16* w = weights[i];
    for (size_t m = 0; m < s.rows.size(); ++m) {
      a.weight[m] = w;
      a.rows[m] = s.rows[m];
      w += s.rows[m] * s.in;
    }
    a.x = x.get();
    a.tokens = tokens;
    a.in = s.in;
    a.norm = s.norm ? norm.get() : nullptr;
    a.eps = 1e-6f;
    a.residual = s.residual ? residual.get() : nullptr;
    a.swiglu = s.swiglu;
    a.y = y.get();
    return a;
  };
  const int calls = std::max(weights.size(), 20);
  const double ours =
      time_us(bench.stream, calls, [&](int i) { check(decode_linear(args(i), bench.stream), "decode_linear"); });
  const DecodeLinear last = args(calls - 1);
  const double error = error_of(y.get(), static_cast<size_t>(tokens * (s.swiglu ? total / 2 : total)),
                                [last] __device__(size_t i) { return linear_value(last, i); });
  const double library = time_us(bench.stream, calls, [&](int i) {  // the product alone
    bench.multiply(weights[i], x.get(), y.get(), total, tokens, s.in);
  });
  bench.memory_row("linear " + std::string(s.name) + ", " + std::to_string(tokens) + " tokens", error, ours, bytes,
                   library);
}

// Value `index` of the output, in float64, for angles of 0.
__device__ double decode_attention_value(const DecodeAttention& a, size_t index) {
  const int64_t D = a.dim, d = static_cast<int64_t>(index) % D, n = static_cast<int64_t>(index) / D % a.heads,
                t = static_cast<int64_t>(index) / D / a.heads, k = n / (a.heads / a.kv_heads);
  const auto* q = static_cast<const Bf16*>(a.qkv) + (t * (a.heads + 2 * a.kv_heads) + n) * D;
  return attention_value(q, a.keys, a.values, D, d, a.lengths[t], [&](int64_t p) {
    const int64_t block = a.block_table[t * a.table_stride + p / a.block_size];
    return ((block * a.kv_heads + k) * a.block_size + p % a.block_size) * D;
  });
}

struct Heads {
  const char* model;
  int64_t heads, kv_heads;
};

void bench_attention(const Bench& bench, const Heads& heads, int64_t tokens, int64_t length, int64_t splits) {
  const int64_t dim = 128, size = 16, each = (length + size - 1) / size, blocks = tokens * each, N = heads.heads,
                K = heads.kv_heads;
  const size_t cache = static_cast<size_t>(blocks * K * size * dim);
  const double bytes = 4.0 * static_cast<double>(tokens * length * K * dim);
  const Rotating keys(cache, 1, 150e6), values(cache, 1, 150e6);
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>((i * 7919) % table.size());
  const Array<int32_t> d_table(table),
      lengths(std::vector<int32_t>(static_cast<size_t>(tokens), static_cast<int32_t>(length))),
      finished(static_cast<size_t>(tokens * K));
  const Array<float> cos(std::vector<float>(static_cast<size_t>(tokens * dim / 2), 1.0f)),
      sin(static_cast<size_t>(tokens * dim / 2));
  const Array<uint8_t> partial(static_cast<size_t>(decode_attention_partial_bytes(tokens, K, dim, splits)));
  const auto qkv = random_values(static_cast<size_t>(tokens * (N + 2 * K) * dim), 1),
             out = random_values(static_cast<size_t>(tokens * N * dim), 1);
  const auto args = [&](int i) {
    return DecodeAttention{qkv.get(),     cos.get(),     sin.get(),      keys[i],  values[i], d_table.get(), each,
                           lengths.get(), nullptr,       tokens,         N,        K,         dim,           size,
                           splits,        partial.get(), finished.get(), out.get()};
  };
  constexpr int kCalls = 40;
  const double us =
      time_us(bench.stream, kCalls, [&](int i) { check(decode_attention(args(i), bench.stream), "decode_attention"); });
  const DecodeAttention last = args(kCalls - 1);
  const double error =
      error_of(out.get(), out.size(), [last] __device__(size_t i) { return decode_attention_value(last, i); });
  bench.memory_row("attention " + std::string(heads.model) + ", " + std::to_string(tokens) + " x " +
                       std::to_string(length) + ", " + std::to_string(splits) + " splits",
                   error, us, bytes);
}

// How far the log-probability of each row's token is from float64's; infinite when the likeliest was asked for and is
// another.
__global__ void sample_errors(const Bf16* logits, int64_t vocab, bool likeliest, const SampledRow* rows, float* out) {
  const Bf16* row = logits + blockIdx.x * vocab;
  const int32_t token = rows[blockIdx.x].token;
  double highest = -INFINITY, sum = 0;
  for (int64_t v = 0; v < vocab; ++v) highest = fmax(highest, static_cast<double>(__bfloat162float(row[v])));
  for (int64_t v = 0; v < vocab; ++v) sum += exp(static_cast<double>(__bfloat162float(row[v])) - highest);
  const double logit = __bfloat162float(row[token]);
  out[blockIdx.x] = likeliest && logit != highest
                        ? INFINITY
                        : static_cast<float>(fabs(rows[blockIdx.x].logprob - (logit - highest - log(sum))));
}

void bench_sample(const Bench& bench, int64_t rows, double temperature) {
  const int64_t vocab = 151936;
  const size_t count = static_cast<size_t>(rows);
  const auto logits = random_values(count * vocab, 3);
  const Array<SampleRow> plain(std::vector<SampleRow>(count, {temperature, 5, 7, 0})),
      with_logprob(std::vector<SampleRow>(count, {temperature, 5, 7, 1}));
  const Array<SampledRow> out(count);
  const Array<uint8_t> partial(static_cast<size_t>(decode_sample_partial_bytes(rows)));
  const Array<int32_t> finished(count);
  const auto run = [&](const Array<SampleRow>& params) {
    check(
        decode_sample(logits.get(), rows, vocab, params.get(), out.get(), partial.get(), finished.get(), bench.stream),
        "decode_sample");
  };
  const double us = time_us(bench.stream, 20, [&](int) { run(plain); });
  run(with_logprob);
  check(cudaStreamSynchronize(bench.stream), "decode_sample");
  const Array<float> d_errors(count);
  sample_errors<<<static_cast<unsigned>(rows), 1>>>(logits.get(), vocab, temperature == 0, out.get(), d_errors.get());
  std::vector<float> errors(count);
  check(cudaMemcpy(errors.data(), d_errors.get(), count * sizeof(float), cudaMemcpyDeviceToHost), "sample_errors");
  bench.memory_row("sample " + std::to_string(rows) + " rows of 151936, temperature " + (temperature > 0 ? "1" : "0"),
                   *std::max_element(errors.begin(), errors.end()), us, 2.0 * static_cast<double>(rows * vocab));
}

void measure_ceilings(Bench& bench) {
  const size_t count = 1u << 29;
  const auto from = random_values(count, 1), to = random_values(count, 1);
  const double copy_us = time_us(bench.stream, 4, [&](int) {
    cudaMemcpyAsync(to.get(), from.get(), count * 2, cudaMemcpyDeviceToDevice, bench.stream);
  });
  bench.copy_tb_s = 4.0 * static_cast<double>(count) / copy_us * 1e-6;
  const int64_t side = 8192;
  const double matrix_us = time_us(
      bench.stream, 4, [&](int) { bench.multiply(from.get(), from.get() + side * side, to.get(), side, side, side); });
  bench.matrix_tflop_s = 2.0 * static_cast<double>(side * side * side) / matrix_us * 1e-6;
  std::printf("a copy %.2f TB/s, cuBLAS's matrices of %ld %.0f TFLOP/s\n", bench.copy_tb_s, static_cast<long>(side),
              bench.matrix_tflop_s);
}

void bench_decode(const Bench& bench) {
  const std::vector<Shape> shapes = {
      {"2B qkv", 1536, {1536, 256, 256}, true, false, false}, {"2B out", 1536, {1536}, false, true, false},
      {"2B gate-up", 1536, {8960, 8960}, true, false, true},  {"2B down", 8960, {1536}, false, true, false},
      {"2B head", 1536, {151936}, true, false, false},        {"7B qkv", 3584, {3584, 512, 512}, true, false, false},
      {"7B out", 3584, {3584}, false, true, false},           {"7B gate-up", 3584, {18944, 18944}, true, false, true},
      {"7B down", 18944, {3584}, false, true, false},         {"7B head", 3584, {152064}, true, false, false}};
  for (const int64_t tokens : {1, 4, 8}) {
    for (const Shape& s : shapes) bench_linear(bench, s, tokens);
  }
  const Heads small = {"2B", 12, 2}, large = {"7B", 28, 4};
  for (const int64_t splits : {1, 2, 4, 8, 16}) {
    bench_attention(bench, small, 1, 400, splits);
    bench_attention(bench, large, 1, 400, splits);
    bench_attention(bench, large, 1, 4000, splits);
  }
  for (const int64_t splits : {1, 2, 4}) {
    bench_attention(bench, small, 32, 400, splits);
    bench_attention(bench, large, 32, 400, splits);
    bench_attention(bench, large, 32, 4000, splits);
  }
  for (const int64_t rows : {1, 32}) {
    bench_sample(bench, rows, 0);
    bench_sample(bench, rows, 1);
  }
}

}  // namespace
}  // namespace parvl::kernels

int main() {
  using namespace parvl::kernels;
  Bench bench;
  check(cudaStreamCreate(&bench.stream), "cudaStreamCreate");
  check(cublasCreate(&bench.blas), "cublasCreate");
  cublasSetStream(bench.blas, bench.stream);
  const Array<uint8_t> workspace(32 << 20);
  cublasSetWorkspace(bench.blas, workspace.get(), workspace.size());
  measure_ceilings(bench);
  bench_decode(bench);
  bench_prefill(bench);
}
