// One request after another: prompt in, tokens out. The plain way, which the engine is compared with.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/status.h"
#include "parvl/exec/generation.h"
#include "parvl/exec/load_options.h"
#include "parvl/media/grammar.h"
#include "parvl/media/prompt.h"

namespace parvl {

struct GeneratorOptions {
  LoadOptions load;
  const Clock* clock = nullptr;  // of the times in GenerateResult, which stay 0 without one; must outlive the generator
};

// The largest request that is to come.
struct RequestSize {
  int64_t prompt_tokens = 1;
  int64_t tokens = 1;       // with the answer
  int64_t max_patches = 0;  // of one image
};

// A model directory. Not thread-safe: one caller at a time.
class Generator {
 public:
  // All but the weights, enough to make prompts. Errors: exit_code(status) = 2 for a directory that is missing,
  // incomplete or unsupported.
  static absl::StatusOr<std::unique_ptr<Generator>> open(const std::string& dir, const GeneratorOptions& options);
  // To be called before generate(). InvalidArgument, before any weight is read, when they do not fit with such a
  // request.
  virtual absl::Status load_weights(const RequestSize& largest) = 0;
  // Both.
  static absl::StatusOr<std::unique_ptr<Generator>> load(const std::string& dir, const GeneratorOptions& options);
  virtual ~Generator() = default;

  virtual const PromptBuilder& prompts() const = 0;
  virtual int64_t max_model_len() const = 0;
  // Defaults of generation_config.json over OpenAI's; the caller overwrites what the request names.
  virtual SamplingParams default_sampling() const = 0;
  virtual std::string device_name() const = 0;
  virtual GrammarCompiler& grammars() = 0;  // of the model's tokenizer

  // Calls `on_token` for each token in order; false from it cancels (finish kNone, OK). The prompt must leave room for
  // one token, else InvalidArgument naming the limit. `grammar`: what the answer must follow; null: any text.
  virtual absl::StatusOr<GenerateResult> generate(const Prompt& prompt, const SamplingParams& sampling,
                                                  const std::function<bool(const TokenEvent&)>& on_token,
                                                  std::shared_ptr<const Grammar> grammar = nullptr) = 0;
};

}  // namespace parvl
