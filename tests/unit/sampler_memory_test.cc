// What choosing a token allocates, counted by replacing operator new, against the formula.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "parvl/exec/sampler.h"
#include "parvl/plan/cost/memory.h"

namespace {
int64_t g_current = 0, g_peak = 0;
}  // namespace

// Not inlined: the compiler would take malloc and delete for a pair that does not belong together.
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* data = std::malloc(bytes);
  if (data == nullptr) throw std::bad_alloc();
  g_current += static_cast<int64_t>(malloc_usable_size(data));
  g_peak = std::max(g_peak, g_current);
  return data;
}
[[gnu::noinline]] void operator delete(void* data) noexcept {
  g_current -= static_cast<int64_t>(malloc_usable_size(data));
  std::free(data);
}
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { operator delete(data); }

namespace parvl {
namespace {

TEST(SamplerMemory, TheFormulaBoundsEveryWayToChoose) {
  BackboneSpec spec;
  spec.vocab = 50'000;
  std::vector<float> logits(static_cast<size_t>(spec.vocab));
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i % 977) * 0.01f;
  const int64_t formula = sampling_bytes(spec, 1);
  std::vector<SamplingParams> ways(4);
  ways[1].presence_penalty = 1;
  ways[1].logit_bias = {{5, 2.0}};
  ways[2].top_k = 40;
  ways[3].top_p = 0.9;
  ways[3].min_tokens = 3;
  for (size_t i = 0; i < ways.size(); ++i) {
    SCOPED_TRACE(i);
    const std::vector<TokenId> end = {1};
    Sampler sampler(ways[i], end, {});
    const int64_t before = g_current;
    g_peak = g_current;
    for (int step = 0; step < 3; ++step) sampler.accept(sampler.choose(logits)->token_id);
    EXPECT_LE(g_peak - before, formula + 4096);
    if (i == 3) {
      EXPECT_GE(g_peak - before, formula * 2 / 3);  // the dearest one comes near it
    }
  }
}

}  // namespace
}  // namespace parvl
