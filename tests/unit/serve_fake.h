// For tests of serving: a tiny model folder with a byte-level tokenizer, and an Engine that says what a test tells it
// to.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parvl/exec/engine.h"
#include "tests/unit/temporary_folder.h"

namespace parvl {

// Writes tokenizer, template, preprocessor and config of a model whose tokens are the 256 bytes (ids 0..255) and the
// specials <|im_start|> 256, <|im_end|> 257, <|vision_start|> 258, <|vision_end|> 259, <|image_pad|> 260; patches of 4
// x 4 pixels, 2 x 2 of them a token. `images` false: a text-only model.
void write_model_folder(const std::string& path, bool images = true);

// What the test and the fake engine share. Every member is guarded by `mutex`; `changed` tells of changes.
struct FakeScript {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> pieces = {"Hel", "lo",
                                     "!"};  // one a token; the last one ends with an empty end token after it
  bool endless = false;                     // repeat the pieces until cancelled
  int64_t allowed = int64_t{1} << 50;       // tokens that may still come out
  int64_t fail_after = -1;                  // tokens before `error` is returned; -1: never
  absl::Status error;
  absl::Status images_refused;                    // accepts_images()
  absl::Status gone;                              // will_accept()
  std::function<void()> capacity_changed;         // as the gateway wants to be told
  int64_t started = 0, ended = 0, cancelled = 0;  // generations
  std::vector<Prompt> prompts;
  std::vector<SamplingParams> samplings;
  std::vector<int> priorities;
  std::vector<std::string> salts;
  std::vector<std::shared_ptr<const Grammar>> grammars;
  int64_t cached_tokens = 0;  // what the first generation finds cached; each later one finds one more
  EngineStats stats;

  void allow(int64_t tokens) {
    std::lock_guard lock(mutex);
    allowed += tokens;
    changed.notify_all();
  }
  // Waits (at most 20 s) until `condition`, which is called with the mutex held.
  bool wait_for(const std::function<bool()>& condition);
};

// An engine that says what the script tells it to, one request after another.
class FakeEngine : public Engine {
 public:
  FakeEngine(std::shared_ptr<FakeScript> script, const std::string& folder, int64_t max_model_len);
  ~FakeEngine() override;
  const PromptBuilder& prompts() const override { return *prompts_; }
  int64_t max_model_len() const override { return max_model_len_; }
  int64_t max_running() const override { return 1; }
  int64_t kv_tokens() const override { return 100 * max_model_len_; }
  SamplingParams default_sampling() const override { return defaults_; }
  std::string device_name() const override { return "test"; }
  GrammarCompiler& grammars() override { return *grammars_; }
  RequestId submit(EngineRequest request) override;
  void cancel(RequestId id) override;
  EngineStats stats() const override;
  absl::Status accepts_images() const override;
  absl::Status will_accept() const override;
  void watch_capacity(std::function<void()> changed) override;

 private:
  struct Job {
    RequestId id;
    EngineRequest request;
    bool cancelled = false;
  };
  void loop();
  absl::StatusOr<GenerateResult> generate(Job& job);
  absl::StatusOr<GenerateResult> speak(Job& job);
  bool stopped(const Job& job);

  std::shared_ptr<FakeScript> script_;
  std::shared_ptr<const PromptBuilder> prompts_;
  std::unique_ptr<GrammarCompiler> grammars_;
  int64_t max_model_len_;
  SamplingParams defaults_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::list<Job> jobs_;  // the first one runs
  int64_t next_id_ = 1;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace parvl
