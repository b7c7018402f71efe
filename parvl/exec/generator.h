// One request after another: prompt in, tokens out. The engine with continuous batching takes this place later.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"
#include "parvl/exec/sampling.h"
#include "parvl/media/prompt.h"

namespace parvl {

struct GeneratorOptions {
  std::string device = "auto";   // auto | cpu | cuda
  std::string dtype = "auto";    // auto (the directory's) | float32 | bfloat16 | float16 | float64
  int64_t max_model_len = 0;     // 0: the model's
  const Clock* clock = nullptr;  // of the times in GenerateResult, which stay 0 without one; must outlive the generator
};

struct TokenEvent {
  TokenId token_id = 0;
  std::string
      text;  // what may be shown now: whole UTF-8 characters, nothing of a stop string or its possible beginning
  TokenLogprob logprob;  // filled when asked for
  FinishReason finish = FinishReason::kNone;
};

struct GenerateResult {
  std::vector<TokenId> token_ids;  // the end token included when it ended the text
  std::string text;
  std::vector<TokenLogprob> logprobs;
  FinishReason finish = FinishReason::kNone;
  int64_t prompt_tokens = 0;
  double ttft_ms = 0;    // from the call to the first token
  double tpot_ms = 0;    // mean time a token after the first; 0 with fewer than two tokens
  double encode_ms = 0;  // vision encoder and projector
};

// A loaded model directory. Not thread-safe: one caller at a time.
class Generator {
 public:
  // Errors: exit_code(status) = 2 for a directory that is missing, incomplete or unsupported.
  static absl::StatusOr<std::unique_ptr<Generator>> load(const std::string& dir, const GeneratorOptions& options);
  virtual ~Generator() = default;

  virtual const PromptBuilder& prompts() const = 0;
  virtual int64_t max_model_len() const = 0;
  // Defaults of generation_config.json over OpenAI's; the caller overwrites what the request names.
  virtual SamplingParams default_sampling() const = 0;
  virtual std::string device_name() const = 0;

  // Calls `on_token` for each token in order; false from it cancels (finish kNone, OK). The prompt must leave room for
  // one token, else InvalidArgument naming the limit.
  virtual absl::StatusOr<GenerateResult> generate(const Prompt& prompt, const SamplingParams& sampling,
                                                  const std::function<bool(const TokenEvent&)>& on_token) = 0;
};

}  // namespace parvl
