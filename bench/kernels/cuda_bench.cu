// The GPU kernels of a decode step on the shapes of Qwen2-VL, each against cuBLAS or the bytes it must read. One table:
// error, microseconds, TB/s, ratio to the library. Run on a GPU: build/bench/cuda_bench
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "parvl/kernels/decode_attention.h"
#include "parvl/kernels/decode_linear.h"
#include "parvl/kernels/decode_sample.h"

namespace {

using namespace parvl::kernels;
using Bf16 = __nv_bfloat16;

void check(int error, const char* what) {
  if (error == 0) return;
  std::fprintf(stderr, "%s: CUDA error %d\n", what, error);
  std::exit(1);
}

__global__ void fill(Bf16* to, size_t count, float scale, uint32_t seed) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    to[i] = __float2bfloat16((static_cast<float>(x & 0xffff) / 32768.0f - 1.0f) * scale);
  }
}

Bf16* random_values(size_t count, float scale) {
  static uint32_t seed = 1;
  Bf16* p = nullptr;
  check(cudaMalloc(&p, count * sizeof(Bf16)), "cudaMalloc");
  fill<<<1024, 256>>>(p, count, scale, seed++ * 977);
  check(cudaDeviceSynchronize(), "fill");
  return p;
}

// Median microseconds of one of `calls` calls in a captured graph (so launches cost what they cost in a step).
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
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  return times[times.size() / 2];
}

struct Shape {
  const char* name;
  int64_t in;
  std::vector<int64_t> rows;
  bool norm, residual, swiglu;
};

void bench_linear(cublasHandle_t blas, cudaStream_t stream, const Shape& s, int64_t tokens) {
  int64_t total = 0;
  for (const int64_t r : s.rows) total += r;
  const double bytes = 2.0 * static_cast<double>(total * s.in);
  const int copies = std::max(2, static_cast<int>(300e6 / bytes));  // more than the cache holds
  std::vector<Bf16*> weights;
  for (int i = 0; i < copies; ++i) weights.push_back(random_values(static_cast<size_t>(total * s.in), 0.02f));
  Bf16 *x = random_values(static_cast<size_t>(tokens * s.in), 1), *norm = random_values(static_cast<size_t>(s.in), 1),
       *residual = random_values(static_cast<size_t>(tokens * total), 1),
       *y = random_values(static_cast<size_t>(tokens * total), 1);
  const int calls = std::max(copies, 20);
  const double ours = time_us(stream, calls, [&](int i) {
    DecodeLinear a;
    a.matrices = static_cast<int>(s.rows.size());
    Bf16* w = weights[i % copies];
    for (size_t m = 0; m < s.rows.size(); ++m) {
      a.weight[m] = w;
      a.rows[m] = s.rows[m];
      w += s.rows[m] * s.in;
    }
    a.x = x;
    a.tokens = tokens;
    a.in = s.in;
    a.norm = s.norm ? norm : nullptr;
    a.residual = s.residual ? residual : nullptr;
    a.swiglu = s.swiglu;
    a.y = y;
    check(decode_linear(a, stream), "decode_linear");
  });
  const float one = 1, zero = 0;
  const double library = time_us(stream, calls, [&](int i) {  // the product alone
    check(cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(total), static_cast<int>(tokens),
                       static_cast<int>(s.in), &one, weights[i % copies], CUDA_R_16BF, static_cast<int>(s.in), x,
                       CUDA_R_16BF, static_cast<int>(s.in), &zero, y, CUDA_R_16BF, static_cast<int>(total),
                       CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx");
  });
  std::printf("%-22s %3ld tokens  %7.2f us  %5.2f TB/s  cuBLAS %7.2f us  %5.2fx\n", s.name, static_cast<long>(tokens),
              ours, bytes / ours * 1e-6, library, library / ours);
  for (Bf16* w : weights) cudaFree(w);
  for (Bf16* p : {x, norm, residual, y}) cudaFree(p);
}

void bench_attention(cudaStream_t stream, const char* name, int64_t heads, int64_t kv_heads, int64_t tokens,
                     int64_t length, int64_t splits) {
  const int64_t dim = 128, size = 16, each = (length + size - 1) / size, blocks = tokens * each;
  const size_t cache = static_cast<size_t>(blocks * kv_heads * size * dim);
  const double bytes = 4.0 * static_cast<double>(tokens * length * kv_heads * dim);
  const int copies = std::max(2, std::min(64, static_cast<int>(300e6 / bytes)));
  std::vector<Bf16*> keys, values;
  for (int i = 0; i < copies; ++i) {
    keys.push_back(random_values(cache, 1));
    values.push_back(random_values(cache, 1));
  }
  std::vector<int32_t> table(static_cast<size_t>(blocks)),
      lengths(static_cast<size_t>(tokens), static_cast<int32_t>(length));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>((i * 7919) % table.size());
  int32_t *d_table, *d_lengths, *finished;
  float *angles, *partial;
  cudaMalloc(&d_table, table.size() * 4);
  cudaMalloc(&d_lengths, lengths.size() * 4);
  cudaMalloc(&finished, static_cast<size_t>(tokens * kv_heads) * 4);
  cudaMemset(finished, 0, static_cast<size_t>(tokens * kv_heads) * 4);
  cudaMalloc(&angles, static_cast<size_t>(tokens * dim) * 4);
  cudaMemset(angles, 0, static_cast<size_t>(tokens * dim) * 4);
  cudaMalloc(&partial, static_cast<size_t>(decode_attention_partial_bytes(tokens, kv_heads, dim, splits)));
  cudaMemcpy(d_table, table.data(), table.size() * 4, cudaMemcpyHostToDevice);
  cudaMemcpy(d_lengths, lengths.data(), lengths.size() * 4, cudaMemcpyHostToDevice);
  Bf16 *qkv = random_values(static_cast<size_t>(tokens * (heads + 2 * kv_heads) * dim), 1),
       *out = random_values(static_cast<size_t>(tokens * heads * dim), 1);
  const double us = time_us(stream, 40, [&](int i) {
    DecodeAttention a;
    a.qkv = qkv;
    a.cos = a.sin = angles;
    a.keys = keys[i % copies];
    a.values = values[i % copies];
    a.block_table = d_table;
    a.table_stride = each;
    a.lengths = d_lengths;
    a.sequences = tokens;
    a.heads = heads;
    a.kv_heads = kv_heads;
    a.dim = dim;
    a.block_size = size;
    a.splits = splits;
    a.partial = partial;
    a.finished = finished;
    a.out = out;
    check(decode_attention(a, stream), "decode_attention");
  });
  std::printf("%-22s %3ld x %5ld tokens, %2ld splits  %7.2f us  %5.2f TB/s\n", name, static_cast<long>(tokens),
              static_cast<long>(length), static_cast<long>(splits), us, bytes / us * 1e-6);
  for (int i = 0; i < copies; ++i) {
    cudaFree(keys[i]);
    cudaFree(values[i]);
  }
  for (void* p : std::initializer_list<void*>{d_table, d_lengths, finished, angles, partial, qkv, out}) cudaFree(p);
}

void bench_sample(cudaStream_t stream, int64_t rows, double temperature) {
  const int64_t vocab = 151936;
  Bf16* logits = random_values(static_cast<size_t>(rows * vocab), 3);
  std::vector<SampleRow> how(static_cast<size_t>(rows), SampleRow{temperature, 5, 7, 0});
  SampleRow* params;
  SampledRow* out;
  void* partial;
  int32_t* finished;
  cudaMalloc(&params, how.size() * sizeof(SampleRow));
  cudaMemcpy(params, how.data(), how.size() * sizeof(SampleRow), cudaMemcpyHostToDevice);
  cudaMalloc(&out, how.size() * sizeof(SampledRow));
  cudaMalloc(&partial, static_cast<size_t>(decode_sample_partial_bytes(rows)));
  cudaMalloc(&finished, how.size() * 4);
  cudaMemset(finished, 0, how.size() * 4);
  const double us = time_us(stream, 20, [&](int) {
    check(decode_sample(logits, rows, vocab, params, out, partial, finished, stream), "decode_sample");
  });
  std::printf("sample %2ld rows of %ld, temperature %.1f  %7.2f us\n", static_cast<long>(rows),
              static_cast<long>(vocab), temperature, us);
  for (void* p : std::initializer_list<void*>{logits, params, out, partial, finished}) cudaFree(p);
}

}  // namespace

int main() {
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  cublasHandle_t blas;
  check(cublasCreate(&blas), "cublasCreate");
  cublasSetStream(blas, stream);
  void* workspace;
  cudaMalloc(&workspace, 32 << 20);
  cublasSetWorkspace(blas, workspace, 32 << 20);
  {  // the ceiling: a copy, bytes read and written
    const size_t count = 1u << 29;
    Bf16 *from = random_values(count, 1), *to = random_values(count, 1);
    const double us =
        time_us(stream, 4, [&](int) { cudaMemcpyAsync(to, from, count * 2, cudaMemcpyDeviceToDevice, stream); });
    std::printf("copy %.2f TB/s\n", 4.0 * static_cast<double>(count) / us * 1e-6);
    cudaFree(from);
    cudaFree(to);
  }
  const std::vector<Shape> shapes = {
      {"2B qkv", 1536, {1536, 256, 256}, true, false, false}, {"2B out", 1536, {1536}, false, true, false},
      {"2B gate-up", 1536, {8960, 8960}, true, false, true},  {"2B down", 8960, {1536}, false, true, false},
      {"2B head", 1536, {151936}, true, false, false},        {"7B qkv", 3584, {3584, 512, 512}, true, false, false},
      {"7B out", 3584, {3584}, false, true, false},           {"7B gate-up", 3584, {18944, 18944}, true, false, true},
      {"7B down", 18944, {3584}, false, true, false},         {"7B head", 3584, {152064}, true, false, false}};
  for (const int64_t tokens : {1, 4, 8}) {
    for (const Shape& s : shapes) bench_linear(blas, stream, s, tokens);
  }
  for (const int64_t splits : {1, 2, 4, 8, 16}) {
    bench_attention(stream, "2B attention", 12, 2, 1, 400, splits);
    bench_attention(stream, "7B attention", 28, 4, 1, 400, splits);
    bench_attention(stream, "7B attention", 28, 4, 1, 4000, splits);
  }
  for (const int64_t rows : {1, 32}) {
    bench_sample(stream, rows, 0);
    bench_sample(stream, rows, 1);
  }
  for (const int64_t splits : {1, 2, 4}) {
    bench_attention(stream, "2B attention", 12, 2, 32, 400, splits);
    bench_attention(stream, "7B attention", 28, 4, 32, 400, splits);
    bench_attention(stream, "7B attention", 28, 4, 32, 4000, splits);
  }
}
