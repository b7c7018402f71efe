// An engine on a small random model, and what the plain generator says to the same requests.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "parvl/base/clock.h"
#include "parvl/base/env.h"
#include "parvl/exec/engine_load.h"
#include "tests/unit/models_fixture.h"

namespace parvl {

// cpu, or what PARVL_TEST_DEVICE says: the same tests run on a GPU.
inline std::string test_device() { return get_env("PARVL_TEST_DEVICE", "cpu"); }

constexpr double kLogprobTolerance = 1e-4;
constexpr double kMargin = 1e-3;  // below it two tokens may change places

struct Case {
  std::shared_ptr<const Prompt> prompt;
  SamplingParams sampling;
  GenerateResult want;
  std::string grammar;  // source
};

class EngineTest : public ModelDirTest {
 protected:
  std::string make_dir(const std::string& family) {
    const std::string dir = make_folder(family);
    write_tiny_model(dir, tiny_config(family),
                     {.copy_from = std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/start"});
    if (family == "llama" || family == "qwen2") std::filesystem::remove(dir + "/preprocessor_config.json");
    return dir;
  }

  static std::shared_ptr<const ProcessedImage> image(const PromptBuilder& prompts, int width, int height, int seed);

  static Prompt chat(const PromptBuilder& prompts, const std::string& before, const std::string& after,
                     std::vector<std::shared_ptr<const ProcessedImage>> images);

  // Prompts that share beginnings and images, and some that share nothing.
  static std::vector<Prompt> make_prompts(const PromptBuilder& prompts);

  // With what the plain generator answers.
  std::vector<Case> make_cases(const std::string& dir, const std::string& dtype = "auto");

  static std::unique_ptr<Engine> load(const std::string& dir, EngineOptions options) {
    options.load.device = test_device();
    if (options.load.max_model_len == 0) options.load.max_model_len = kMaxLen;
    auto engine = load_engine(dir, options, clock());
    if (!engine.ok()) throw std::runtime_error(engine.status().ToString());
    return *std::move(engine);
  }
  static const Clock& clock() {
    static const RealClock kClock;
    return kClock;
  }

  struct Pending {
    std::promise<absl::StatusOr<GenerateResult>> end;
    std::string text;
    int ends = 0;
  };
  static RequestId submit(Engine& engine, const std::shared_ptr<const Prompt>& prompt, const SamplingParams& sampling,
                          const std::shared_ptr<Pending>& pending, std::function<void()> on_token = {},
                          const std::string& grammar = "", std::vector<TokenId> generated = {});

  // All cases at once, `times` over.
  static void run_all(Engine& engine, const std::vector<Case>& cases, int times);

  // Equal until two candidates were so close that rounding may choose: `got` is what comes behind `from` tokens.
  static void expect_equal(const GenerateResult& got, const GenerateResult& want, size_t from = 0);

  static void expect_nothing_held(const Engine& engine) {
    // The last end comes from inside a step; its figures come a moment later.
    while (engine.stats().running > 0 || engine.stats().blocks_used > 0) std::this_thread::yield();
    EXPECT_EQ(engine.stats().waiting, 0);
  }

  static constexpr int64_t kMaxLen = 256;
};

}  // namespace parvl
