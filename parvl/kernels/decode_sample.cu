#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "parvl/kernels/decode_sample.h"
#include "parvl/kernels/launch.cuh"

namespace parvl::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kParts = static_cast<int>(kSampleParts);

// What one block finds in its part of a row.
struct Part {
  float max;  // the largest logit, its first token; -infinity when there is none
  int32_t token;
  int32_t broken;
  int32_t drawn;   // the winner of the race over this part; -1 when there is none
  double arrival;  // its time
  double sum;      // Σ exp(logit − the row's largest)
  float drawn_logit;
  int32_t padding[7];
};
static_assert(sizeof(Part) == kSamplePartBytes);

// Philox 4x32-10, as base/rng.h.
__device__ double uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
  uint32_t c[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), static_cast<uint32_t>(stream),
                   static_cast<uint32_t>(stream >> 32)};
  uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c[0], b = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  const uint64_t bits = (static_cast<uint64_t>(c[0]) << 32 | c[1]) >> 11;
  return (static_cast<double>(bits) + 0.5) * 0x1.0p-53;
}

// The part's logits, eight at a time: f(token, logit).
template <typename F>
__device__ void for_each_logit(const __nv_bfloat16* row, int64_t vocab, F f) {
  const int64_t eights = vocab / 8, each = (eights + kParts - 1) / kParts;
  const int64_t begin = blockIdx.x * each, end = min(begin + each, eights);
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const uint4 words = *reinterpret_cast<const uint4*>(row + i * 8);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      f(static_cast<int32_t>(i * 8 + 2 * j), __uint_as_float(w[j] << 16));
      f(static_cast<int32_t>(i * 8 + 2 * j + 1), __uint_as_float(w[j] & 0xffff0000u));
    }
  }
}

// Reduces a value over the block with `better(a, b)` → the one to keep. All threads get the result.
template <typename T, typename Merge>
__device__ T reduce(T value, Merge merge) {
  __shared__ T shared[kThreads];
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] = merge(shared[threadIdx.x], shared[threadIdx.x + half]);
    __syncthreads();
  }
  const T result = shared[0];
  __syncthreads();
  return result;
}

struct Peak {
  float max;
  int32_t token, broken;
};
__device__ Peak higher(const Peak& a, const Peak& b) {
  const bool second = b.max > a.max || (b.max == a.max && b.token < a.token);
  return {second ? b.max : a.max, second ? b.token : a.token, a.broken | b.broken};
}

__global__ void __launch_bounds__(kThreads) peak_kernel(const __nv_bfloat16* logits, int64_t vocab, Part* parts) {
  wait_for_previous_kernel();
  start_next_kernel();
  Peak peak = {-INFINITY, INT32_MAX, 0};
  for_each_logit(logits + blockIdx.y * vocab, vocab, [&](int32_t token, float x) {
    if (!(x < INFINITY)) peak.broken = 1;
    if (x > peak.max) peak = {x, token, peak.broken};
  });
  peak = reduce(peak, higher);
  if (threadIdx.x != 0) return;
  Part& part = parts[blockIdx.y * kParts + blockIdx.x];
  part.max = peak.max;
  part.token = peak.token;
  part.broken = peak.broken;
}

struct Runner {
  double arrival;
  int32_t token;
  float logit;
};
__device__ Runner earlier(const Runner& a, const Runner& b) {
  if (b.token < 0) return a;
  if (a.token < 0) return b;
  const bool second = b.arrival < a.arrival || (b.arrival == a.arrival && b.token < a.token);
  return second ? b : a;
}

// The softmax's sum and, with a temperature, the race: the smallest −log(u) / w wins, where w = exp((logit − max) / T).
__global__ void __launch_bounds__(kThreads)
    sample_kernel(const __nv_bfloat16* logits, int64_t vocab, const SampleRow* params, Part* parts, int32_t* finished,
                  SampledRow* out) {
  __shared__ bool last;
  wait_for_previous_kernel();
  start_next_kernel();
  const int64_t row = blockIdx.y;
  Part* mine = parts + row * kParts;
  Peak peak = {-INFINITY, INT32_MAX, 0};
  for (int i = 0; i < kParts; ++i) peak = higher(peak, {mine[i].max, mine[i].token, mine[i].broken});
  const SampleRow how = params[row];
  const bool broken = peak.broken != 0 || peak.max == -INFINITY;

  double sum = 0;
  Runner runner = {INFINITY, -1, 0};
  const bool draws = how.temperature > 0, sums = how.logprob != 0;
  if (!broken && (draws || sums)) {
    for_each_logit(logits + row * vocab, vocab, [&](int32_t token, float x) {
      if (x == -INFINITY) return;
      if (sums) sum += exp(static_cast<double>(x) - peak.max);
      if (!draws) return;
      const double w = exp((static_cast<double>(x) - peak.max) / how.temperature);
      const double u = uniform(how.seed, static_cast<uint64_t>(how.position), static_cast<uint64_t>(token));
      if (1.0 - u > runner.arrival * w) return;  // −log(u) ≥ 1 − u
      runner = earlier(runner, {-log(u) / w, token, x});
    });
  }
  sum = reduce(sum, [](double a, double b) { return a + b; });
  runner = reduce(runner, earlier);
  if (threadIdx.x == 0) {
    Part& part = mine[blockIdx.x];
    part.sum = sum;
    part.arrival = runner.arrival;
    part.drawn = runner.token;
    part.drawn_logit = runner.logit;
    __threadfence();
    last = atomicAdd(finished + row, 1) == kParts - 1;
  }
  __syncthreads();
  if (!last || threadIdx.x != 0) return;
  __threadfence();
  finished[row] = 0;
  sum = 0;
  runner = {INFINITY, -1, 0};
  for (int i = 0; i < kParts; ++i) {
    const volatile Part& part = mine[i];
    sum += part.sum;
    runner = earlier(runner, {part.arrival, part.drawn, part.drawn_logit});
  }
  SampledRow& result = out[row];
  result.broken = broken || (draws && runner.token < 0);
  result.token = draws ? runner.token : peak.token;
  const double logit = draws ? runner.logit : peak.max;
  result.logprob = sums ? static_cast<float>(logit - (peak.max + log(sum))) : 0;
}

}  // namespace

int decode_sample(const void* logits, int64_t rows, int64_t vocab, const SampleRow* params, SampledRow* out,
                  void* partial, int32_t* finished, void* stream) {
  if (rows < 1 || vocab < 8 || vocab % 8 != 0) return cudaErrorInvalidValue;
  const LaunchShape shape = {dim3(kParts, static_cast<unsigned>(rows)), kThreads, static_cast<cudaStream_t>(stream)};
  const auto* x = static_cast<const __nv_bfloat16*>(logits);
  auto* parts = static_cast<Part*>(partial);
  const int error = launch_dependent(peak_kernel, shape, x, vocab, parts);
  if (error != 0) return error;
  return launch_dependent(sample_kernel, shape, x, vocab, params, parts, finished, out);
}

}  // namespace parvl::kernels
