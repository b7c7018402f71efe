// Choosing the next token of each row of logits on a GPU, for the plain cases: the likeliest token, or a draw from the
// whole softmax. exec/sampler.h defines the draw; this gives the same token.
#pragma once

#include <cstdint>

namespace parvl::kernels {

struct SampleRow {
  double temperature = 0;  // 0: the likeliest (lowest id among equals)
  uint64_t seed = 0;
  int64_t position = 0;  // tokens before it
  int64_t logprob = 0;   // not 0: SampledRow::logprob is wanted
};
struct SampledRow {
  int32_t token = 0;
  float logprob = 0;   // of it, when wanted: log-softmax of the logits
  int32_t broken = 0;  // a logit was NaN or +infinity: there is no token
  int32_t padding = 0;
};

constexpr int64_t kSampleParts = 16;      // blocks of threads a row is divided among
constexpr int64_t kSamplePartBytes = 64;  // that each leaves for the last
constexpr int64_t decode_sample_partial_bytes(int64_t rows) { return rows * kSampleParts * kSamplePartBytes; }

// Device pointers. logits [rows, vocab] bfloat16, contiguous, vocab a multiple of 8; `partial`:
// decode_sample_partial_bytes(rows); `finished` int32 [rows], zero before the first launch and after each. Launches two
// kernels on the stream; returns cudaGetLastError().
int decode_sample(const void* logits, int64_t rows, int64_t vocab, const SampleRow* params, SampledRow* out,
                  void* partial, int32_t* finished, void* stream);

}  // namespace parvl::kernels
