// What fits: the figures add up, the advice is true, and less memory never makes more room.
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <gtest/gtest.h>

#include "parvl/plan/cost/fit.h"

namespace parvl {
namespace {

constexpr int64_t kMiB = 1 << 20, kGiB = int64_t{1} << 30;

ModelSpec half_billion() {
  ModelSpec spec;
  spec.family = Family::kQwen2Vl;
  spec.backbone = {24, 896, 14, 2, 64, 4864, 151'936, 32'768};
  spec.backbone.qkv_bias = spec.backbone.tied = true;
  spec.vision.emplace();
  spec.vision->layers = 8;
  spec.vision->hidden = 512;
  spec.vision->heads = 8;
  spec.vision->intermediate = 2048;
  spec.vision->activation = "quick_gelu";
  return spec;
}

ServingSettings settings() {
  ServingSettings s;
  s.dtype = DType::kBFloat16;
  s.max_model_len = 32'768;
  s.max_patches = 5120;
  return s;
}

MemoryThere there(int64_t bytes, bool cuda = false) { return {bytes, "of the test's memory", {cuda, 2}}; }

// Settings with what the advice says.
ServingSettings applied(ServingSettings s, const std::string& message) {
  if (absl::StrContains(message, "without --kv-cache-memory-bytes")) s.kv_cache_bytes = 0;
  if (absl::StrContains(message, "without --encoder-cache-bytes")) s.encoder_cache_bytes = 0;
  if (absl::StrContains(message, "--dtype bfloat16")) s.dtype = DType::kBFloat16;
  const std::vector<std::string> words =
      absl::StrSplit(absl::StrReplaceAll(message, {{" to ", " "}}), absl::ByAnyChar(" ,"));
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    int64_t value = 0;
    if (!absl::SimpleAtoi(words[i + 1], &value)) continue;
    if (words[i] == "--kv-cache-memory-bytes") s.kv_cache_bytes = value;
    if (words[i] == "--encoder-cache-bytes") s.encoder_cache_bytes = value;
    if (words[i] == "--max-model-len") s.max_model_len = value;
    if (words[i] == "--max-num-batched-tokens") s.max_batched_tokens = value;
    if (words[i] == "--max-num-seqs") s.max_seqs = value;
  }
  return s;
}

TEST(Fit, FillsTheMemoryThereIs) {
  const auto cpu = plan_serving_memory(half_billion(), settings(), there(64 * kGiB));
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  EXPECT_EQ(cpu->weights, weight_bytes(half_billion(), DType::kBFloat16).total());
  EXPECT_LE(cpu->kv, 8 * kGiB);
  EXPECT_GT(cpu->kv, 8 * kGiB - kMiB);
  EXPECT_EQ(cpu->encoder_cache, kGiB);
  const auto gpu = plan_serving_memory(half_billion(), settings(), there(16 * kGiB, true));
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  EXPECT_LE(gpu->total(), 16 * kGiB);
  EXPECT_GT(gpu->total(), 16 * kGiB - kMiB);
  ServingSettings few = settings();
  few.max_model_len = 256;
  const auto useful = plan_serving_memory(half_billion(), few, there(64 * kGiB, true));
  ASSERT_TRUE(useful.ok());
  EXPECT_EQ(useful->num_blocks, 64 * 16 * 4);
}

TEST(Fit, CountsOnlyTheModulesThatAreHeld) {
  const WeightBytes weights = weight_bytes(half_billion(), DType::kBFloat16);
  for (const bool cuda : {false, true}) {
    ServingSettings s = settings();
    const auto whole = plan_serving_memory(half_billion(), s, there(64 * kGiB, cuda));
    s.held = {.encoder = true, .backbone = false};
    const auto encoder = plan_serving_memory(half_billion(), s, there(64 * kGiB, cuda));
    s.held = {.encoder = false, .backbone = true};
    const auto llm = plan_serving_memory(half_billion(), s, there(64 * kGiB, cuda));
    ASSERT_TRUE(whole.ok() && encoder.ok() && llm.ok());
    EXPECT_EQ(encoder->weights, weights.vision_encoder + weights.projector);
    EXPECT_EQ(encoder->encode, whole->encode);
    EXPECT_EQ(encoder->total(), encoder->weights + encoder->encode);
    EXPECT_EQ(encoder->num_blocks, 0);
    EXPECT_EQ(llm->weights, weights.backbone);
    EXPECT_EQ(llm->encode, 0);
    EXPECT_EQ(llm->step, whole->step);
    EXPECT_EQ(llm->encoder_cache, whole->encoder_cache);  // it holds what is received
    EXPECT_GE(llm->kv, whole->kv);
  }
  // An encoder alone fits where the whole does not, and its sentence says nothing of what it does not have.
  ServingSettings s = settings();
  s.held.backbone = false;
  const int64_t needs = plan_serving_memory(half_billion(), s, there(64 * kGiB))->total();
  EXPECT_TRUE(plan_serving_memory(half_billion(), s, there(needs)).ok());
  const std::string message(plan_serving_memory(half_billion(), s, there(needs - 1)).status().message());
  EXPECT_TRUE(absl::StrContains(message, "weights ") && absl::StrContains(message, " + encoding an image ")) << message;
  EXPECT_FALSE(absl::StrContains(message, "KV memory") || absl::StrContains(message, "a step")) << message;
  EXPECT_TRUE(absl::EndsWith(message, "take a smaller model, or a machine with more memory")) << message;
  s.dtype = DType::kFloat32;
  const std::string wide(plan_serving_memory(half_billion(), s, there(needs)).status().message());
  EXPECT_TRUE(absl::EndsWith(wide, "start with --dtype bfloat16")) << wide;
}

TEST(Fit, TheSentenceHoldsEveryFigureAndAFlag) {
  const std::string message(plan_serving_memory(half_billion(), settings(), there(kGiB * 3 / 2)).status().message());
  for (const char* part : {"weights ", " + KV memory ", " + a step ", " + encoding an image ", " + encoded images ",
                           "and 1.5 GiB of the test's memory may be used; start with --"}) {
    EXPECT_TRUE(absl::StrContains(message, part)) << message;
  }
  EXPECT_EQ(exit_code(plan_serving_memory(half_billion(), settings(), there(kGiB * 3 / 2)).status()), 2);
}

TEST(Fit, ValuesOutsideTheirRangeNameTheirFlag) {
  const int64_t huge = 1'000'000'000'000'000;
  const auto refusal = [](int64_t ServingSettings::*value, int64_t number) {
    ServingSettings s = settings();
    s.*value = number;
    const absl::Status status = plan_serving_memory(half_billion(), s, there(64 * kGiB)).status();
    EXPECT_EQ(exit_code(status), 2);
    return std::string(status.message());
  };
  for (const int64_t value : {int64_t{-5}, int64_t{0}, huge}) {
    EXPECT_EQ(refusal(&ServingSettings::max_seqs, value),
              absl::StrCat("--max-num-seqs must be between 1 and 65536, found ", value));
    EXPECT_EQ(refusal(&ServingSettings::max_batched_tokens, value),
              absl::StrCat("--max-num-batched-tokens must be between 1 and 16777216, found ", value));
  }
  for (const int64_t value : {int64_t{-5}, 2 * huge}) {
    EXPECT_EQ(refusal(&ServingSettings::kv_cache_bytes, value),
              absl::StrCat("--kv-cache-memory-bytes must be between 0 and 1125899906842624, found ", value));
    EXPECT_EQ(refusal(&ServingSettings::encoder_cache_bytes, value),
              absl::StrCat("--encoder-cache-bytes must be between 0 and 1125899906842624, found ", value));
  }
}

// At the ends of the ranges, with a context of a million tokens, nothing wraps around.
TEST(Fit, TheLargestValuesDoNotOverflow) {
  ModelSpec spec = half_billion();
  spec.backbone.max_positions = 1 << 20;
  for (const bool cuda : {false, true}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat64}) {
      ServingSettings s = settings();
      s.dtype = dtype;
      s.max_model_len = 1 << 20;
      s.max_seqs = 1 << 16;
      s.max_batched_tokens = 1 << 24;
      s.kv_cache_bytes = s.encoder_cache_bytes = int64_t{1} << 50;
      const auto whole = plan_serving_memory(spec, s, there(int64_t{1} << 62, cuda));
      ASSERT_TRUE(whole.ok()) << whole.status();
      for (const int64_t part : {whole->weights, whole->kv, whole->step, whole->encode, whole->encoder_cache}) {
        EXPECT_GT(part, 0);
        EXPECT_LT(part, int64_t{1} << 60);
      }
    }
  }
}

// Over the whole range of memory: it fits, or the advice makes it fit, or there is no flag for it.
TEST(Fit, TheAdviceIsTrue) {
  int fitted = 0, advised = 0, hopeless = 0;
  for (const bool cuda : {false, true}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      for (const int64_t kv : {int64_t{0}, kMiB, 600 * kMiB, 40 * kGiB}) {
        for (const int64_t cache : {int64_t{0}, 3 * kGiB}) {
          for (int64_t bytes = 64 * kMiB; bytes <= 64 * kGiB; bytes += bytes / 3) {
            ServingSettings s = settings();
            s.dtype = dtype;
            s.kv_cache_bytes = kv;
            s.encoder_cache_bytes = cache;
            const auto memory = plan_serving_memory(half_billion(), s, there(bytes, cuda));
            if (memory.ok()) {
              EXPECT_LE(memory->total(), bytes);
              EXPECT_GE(memory->num_blocks * s.block_size, s.max_model_len);
              ++fitted;
              continue;
            }
            const std::string message(memory.status().message());
            if (absl::StrContains(message, "take a smaller model")) {
              EXPECT_LT(bytes, 2 * kGiB) << message;
              ++hopeless;
              continue;
            }
            ++advised;
            // A first flag may uncover the next lack, with advice of its own.
            absl::Status again = memory.status();
            for (int round = 0; round < 3 && !again.ok(); ++round) {
              s = applied(s, std::string(again.message()));
              again = plan_serving_memory(half_billion(), s, there(bytes, cuda)).status();
            }
            EXPECT_TRUE(again.ok() || absl::StrContains(again.message(), "take a smaller model")) << message << "\n"
                                                                                                  << again;
          }
        }
      }
    }
  }
  EXPECT_GT(fitted, 50);
  EXPECT_GT(advised, 50);
  EXPECT_GT(hopeless, 10);
}

TEST(Fit, OneRequestNamesWhatIsTooMuch) {
  const auto says = [](const OneRequest& request, int64_t bytes) {
    return std::string(check_one_request(half_billion(), request, there(bytes)).message());
  };
  const OneRequest small{DType::kBFloat16, 100, 200, 256};
  EXPECT_EQ(says(small, 4 * kGiB), "");
  const int64_t weights = weight_bytes(half_billion(), DType::kBFloat16).total();
  EXPECT_TRUE(absl::EndsWith(says(small, weights - 1), "take a smaller model, or a machine with more memory"));
  EXPECT_TRUE(absl::EndsWith(says({DType::kFloat32, 100, 200, 0}, weights + 100 * kMiB), "ask with --dtype bfloat16"));
  EXPECT_TRUE(absl::EndsWith(says({DType::kBFloat16, 30'000, 30'001, 0}, weights + 100 * kMiB),
                             "shorten the prompt, or send fewer or smaller images"));
  const std::string answer = says({DType::kBFloat16, 100, 32'000, 0}, weights + 200 * kMiB);
  const size_t at = answer.find("--max-tokens ");
  ASSERT_NE(at, std::string::npos) << answer;
  const int64_t tokens = std::stoll(answer.substr(at + 13));
  EXPECT_EQ(says({DType::kBFloat16, 100, 100 + tokens, 0}, weights + 200 * kMiB), "");
  EXPECT_NE(says({DType::kBFloat16, 100, 102 + tokens, 0}, weights + 200 * kMiB), "");
}

}  // namespace
}  // namespace parvl
