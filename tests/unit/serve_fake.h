// For tests of serving: a tiny model folder with a byte-level tokenizer, and a Generator that says what a test tells it
// to.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "parvl/exec/generator.h"

namespace parvl {

// A folder that is removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Writes tokenizer, template, preprocessor and config of a model whose tokens are the 256 bytes (ids 0..255) and the
// specials <|im_start|> 256, <|im_end|> 257, <|vision_start|> 258, <|vision_end|> 259, <|image_pad|> 260; patches of 4
// x 4 pixels, 2 x 2 of them a token. `images` false: a text-only model.
void write_model_folder(const std::string& path, bool images = true);

// What the test and the fake generator share. Every member is guarded by `mutex`; `changed` tells of changes.
struct FakeScript {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> pieces = {"Hel", "lo",
                                     "!"};  // one a token; the last one ends with an empty end token after it
  bool endless = false;                     // repeat the pieces until cancelled
  int64_t allowed = int64_t{1} << 50;       // tokens that may still come out
  int64_t fail_after = -1;                  // tokens before `error` is returned; -1: never
  absl::Status error;
  int64_t started = 0, ended = 0, cancelled = 0;  // calls of generate
  std::vector<Prompt> prompts;
  std::vector<SamplingParams> samplings;

  void allow(int64_t tokens) {
    std::lock_guard lock(mutex);
    allowed += tokens;
    changed.notify_all();
  }
  // Waits (at most 20 s) until `condition`, which is called with the mutex held.
  bool wait_for(const std::function<bool()>& condition);
};

class FakeGenerator : public Generator {
 public:
  FakeGenerator(std::shared_ptr<FakeScript> script, const std::string& folder, int64_t max_model_len);
  const PromptBuilder& prompts() const override { return *prompts_; }
  int64_t max_model_len() const override { return max_model_len_; }
  SamplingParams default_sampling() const override { return defaults_; }
  std::string device_name() const override { return "test"; }
  absl::StatusOr<GenerateResult> generate(const Prompt& prompt, const SamplingParams& sampling,
                                          const std::function<bool(const TokenEvent&)>& on_token) override;

 private:
  absl::StatusOr<GenerateResult> speak(const SamplingParams& sampling,
                                       const std::function<bool(const TokenEvent&)>& on_token);

  std::shared_ptr<FakeScript> script_;
  std::shared_ptr<const PromptBuilder> prompts_;
  int64_t max_model_len_;
  SamplingParams defaults_;
};

}  // namespace parvl
