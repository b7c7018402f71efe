// The engine against the plain generator: the same tokens and log-probabilities however requests are cut, batched,
// cached or preempted; and its promises about ends.
#include <gmock/gmock.h>

#include <future>

#include "parvl/base/clock.h"
#include "parvl/base/env.h"
#include "parvl/exec/engine_load.h"
#include "parvl/exec/generator.h"
#include "parvl/media/grammar.h"
#include "parvl/media/json_schema.h"
#include "tests/unit/models_fixture.h"

namespace parvl {
namespace {

// cpu, or what PARVL_TEST_DEVICE says: the same tests run on a GPU.
std::string test_device() { return get_env("PARVL_TEST_DEVICE", "cpu"); }

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

  static std::shared_ptr<const ProcessedImage> image(const PromptBuilder& prompts, int width, int height, int seed) {
    Image out;
    out.width = width;
    out.height = height;
    for (int i = 0; i < width * height * 3; ++i)
      out.rgb.push_back(static_cast<uint8_t>((i + seed) * (37 + seed) % 251));
    auto processed = prompts.image_processor().process(out);
    if (!processed.ok()) throw std::runtime_error(processed.status().ToString());
    return std::make_shared<const ProcessedImage>(*std::move(processed));
  }

  static Prompt chat(const PromptBuilder& prompts, const std::string& before, const std::string& after,
                     std::vector<std::shared_ptr<const ProcessedImage>> images) {
    Message message{"user", {{ContentPart::Kind::kText, before, -1}}};
    for (size_t i = 0; i < images.size(); ++i) {
      message.content.push_back({ContentPart::Kind::kImage, "", static_cast<int>(i)});
      message.content.push_back({ContentPart::Kind::kText, after, -1});
    }
    auto prompt = prompts.build({message}, std::move(images), {});
    if (!prompt.ok()) throw std::runtime_error(prompt.status().ToString());
    return *std::move(prompt);
  }

  // Prompts that share beginnings and images, and some that share nothing.
  static std::vector<Prompt> make_prompts(const PromptBuilder& prompts) {
    std::vector<Prompt> out;
    for (const char* text : {"what is it?", "what is it now, after all that was said before?", "x"}) {
      out.push_back(prompts.build_plain(text));
      if (!prompts.has_images()) continue;
      out.push_back(chat(prompts, "see", text, {image(prompts, 20, 28, 1)}));
      out.push_back(chat(prompts, "see", text, {image(prompts, 20, 28, 2)}));  // equal text, another image
      out.push_back(chat(prompts, text, "and", {image(prompts, 28, 20, 1), image(prompts, 20, 28, 1)}));
    }
    return out;
  }

  std::vector<Case> make_cases(const std::string& dir, const std::string& dtype = "auto") {
    GeneratorOptions options;
    options.load.device = test_device();
    options.load.dtype = dtype;
    options.load.max_model_len = kMaxLen;
    auto generator = *Generator::load(dir, options);
    std::vector<Case> cases;
    for (Prompt& prompt : make_prompts(generator->prompts())) {
      Case c;
      c.prompt = std::make_shared<const Prompt>(std::move(prompt));
      c.sampling.temperature = cases.size() % 2 == 0 ? 0 : 0.8;
      c.sampling.seed = cases.size();
      c.sampling.max_tokens = 30 + static_cast<int64_t>(cases.size());
      c.sampling.ignore_eos = true;
      c.sampling.logprobs = true;
      c.sampling.top_logprobs = 5;
      if (cases.size() % 3 == 1) c.sampling.frequency_penalty = 0.5;
      c.want = *generator->generate(*c.prompt, c.sampling, nullptr);
      cases.push_back(std::move(c));
    }
    return cases;
  }

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
                          const std::string& grammar = "") {
    EngineRequest request;
    if (!grammar.empty()) request.grammar = *engine.grammars().compile(grammar);
    request.prompt = prompt;
    request.sampling = sampling;
    request.on_token = [pending, on_token](const TokenEvent& event) {
      pending->text += event.text;
      if (on_token) on_token();
    };
    request.on_end = [pending](const absl::StatusOr<GenerateResult>& result) {
      EXPECT_EQ(++pending->ends, 1);
      pending->end.set_value(result);
    };
    return engine.submit(std::move(request));
  }

  // All cases at once, `times` over.
  static void run_all(Engine& engine, const std::vector<Case>& cases, int times) {
    std::vector<std::pair<const Case*, std::shared_ptr<Pending>>> pending;
    for (int i = 0; i < times; ++i) {
      for (const Case& c : cases) {
        pending.emplace_back(&c, std::make_shared<Pending>());
        submit(engine, c.prompt, c.sampling, pending.back().second, {}, c.grammar);
      }
    }
    for (auto& [c, p] : pending) {
      const auto result = p->end.get_future().get();
      ASSERT_TRUE(result.ok()) << result.status();
      expect_equal(*result, c->want);
      EXPECT_EQ(p->text, result->text);
      EXPECT_EQ(result->prompt_tokens, static_cast<int64_t>(c->prompt->ids.size()));
    }
  }

  // Equal until two candidates were so close that rounding may choose.
  static void expect_equal(const GenerateResult& got, const GenerateResult& want) {
    ASSERT_EQ(got.logprobs.size(), got.token_ids.size());
    for (size_t i = 0; i < want.token_ids.size(); ++i) {
      ASSERT_LT(i, got.token_ids.size());
      const TokenLogprob &a = got.logprobs[i], &b = want.logprobs[i];
      if (b.top[0].second - b.top[1].second < kMargin) return;
      EXPECT_NEAR(a.top[0].second, b.top[0].second, kLogprobTolerance) << "token " << i;
      ASSERT_EQ(got.token_ids[i], want.token_ids[i]) << "token " << i;
      EXPECT_NEAR(a.logprob, b.logprob, kLogprobTolerance) << "token " << i;
    }
    EXPECT_EQ(got.token_ids.size(), want.token_ids.size());
    EXPECT_EQ(got.finish, want.finish);
  }

  static void expect_nothing_held(const Engine& engine) {
    // The last end comes from inside a step; its figures come a moment later.
    while (engine.stats().running > 0 || engine.stats().blocks_used > 0) std::this_thread::yield();
    EXPECT_EQ(engine.stats().waiting, 0);
  }

  static constexpr int64_t kMaxLen = 256;
};

class EngineFamilyTest : public EngineTest, public testing::WithParamInterface<const char*> {};

TEST_P(EngineFamilyTest, EqualsTheGeneratorHoweverItIsCutAndBatched) {
  const std::string dir = make_dir(GetParam());
  const std::vector<Case> cases = make_cases(dir);
  for (const int64_t chunk : {16, 50, 2048}) {
    for (const int64_t seqs : {1, 5, 16}) {
      for (const bool cache : {false, true}) {
        SCOPED_TRACE(testing::Message() << chunk << " tokens a step, " << seqs << " sequences, cache " << cache);
        EngineOptions options;
        options.max_batched_tokens = chunk;
        options.max_seqs = seqs;
        options.prefix_caching = cache;
        const auto engine = load(dir, options);
        run_all(*engine, cases, 2);
        run_all(*engine, cases, 1);  // warm
        expect_nothing_held(*engine);
        const SchedulerStats stats = engine->stats();
        EXPECT_EQ(stats.prefix_hits > 0, cache);
        if (engine->prompts().has_images()) {
          EXPECT_GT(stats.encoder_hits, 0);
        }
      }
    }
  }
}

TEST_P(EngineFamilyTest, EqualsTheGeneratorUnderPreemption) {
  const std::string dir = make_dir(GetParam());
  std::vector<Case> cases = make_cases(dir);
  for (const bool cache : {false, true}) {
    SCOPED_TRACE(cache);
    EngineOptions options;
    options.max_seqs = 12;
    options.max_batched_tokens = 64;
    options.prefix_caching = cache;
    options.kv_cache_bytes = 2 * 2 * 2 * 8 * 16 * 4 * (kMaxLen / 16 + 3);  // hardly more than one sequence needs
    const auto engine = load(dir, options);
    run_all(*engine, cases, 4);
    expect_nothing_held(*engine);
    EXPECT_GT(engine->stats().preemptions, 0);
  }
}

// Answers that follow grammars, and some that do not, side by side.
TEST_F(EngineTest, GrammarsHoldUnderPreemption) {
  const std::string dir = make_dir("qwen2");
  std::vector<Case> cases;
  {
    GeneratorOptions options;
    options.load.device = test_device();
    options.load.max_model_len = kMaxLen;
    auto generator = *Generator::load(dir, options);
    const OrderedJson schema = *supported_schema(
        OrderedJson::parse(R"({"type": "object", "properties": {"words": {"type": "array", "minItems": 4, "maxItems": 9,
                               "items": {"type": "string", "maxLength": 12}}, "n": {"type": "integer"}},
                               "required": ["words", "n"]})"),
        "schema");
    for (uint64_t seed = 0; seed < 9; ++seed) {
      Case c;
      c.prompt = std::make_shared<const Prompt>(generator->prompts().build_plain("say it"));
      c.sampling.temperature = seed == 0 ? 0 : 1;
      c.sampling.seed = seed;
      c.sampling.max_tokens = 200;
      c.sampling.logprobs = true;
      c.sampling.top_logprobs = 2;
      c.sampling.ignore_eos = true;  // the grammar ends it all the same
      if (seed % 3 == 2) c.sampling.max_tokens = 40;
      if (seed % 3 == 1) c.sampling.min_tokens = 200;
      std::shared_ptr<const Grammar> grammar;
      if (seed % 4 != 3) {
        c.grammar = grammar_source(json_format(schema));
        grammar = *generator->grammars().compile(c.grammar);
      }
      c.want = *generator->generate(*c.prompt, c.sampling, nullptr, grammar);
      if (grammar != nullptr && c.want.finish == FinishReason::kStop) {
        EXPECT_TRUE(OrderedJson::parse(c.want.text)["words"].size() >= 4) << c.want.text;
      }
      cases.push_back(std::move(c));
    }
  }
  const auto ended = [](const Case& c) { return !c.grammar.empty() && c.want.finish == FinishReason::kStop; };
  EXPECT_GE(std::count_if(cases.begin(), cases.end(), ended), 3);
  EngineOptions options;
  options.max_seqs = 12;
  options.max_batched_tokens = 64;
  options.kv_cache_bytes = 2 * 2 * 2 * 8 * 16 * 4 * (kMaxLen / 16 + 3);  // hardly more than one sequence needs
  const auto engine = load(dir, options);
  run_all(*engine, cases, 3);
  expect_nothing_held(*engine);
  EXPECT_GT(engine->stats().preemptions, 0);
}

INSTANTIATE_TEST_SUITE_P(Families, EngineFamilyTest, testing::Values("llama", "qwen2", "qwen2_vl", "qwen2_5_vl"));

TEST_F(EngineTest, TheExampleModelInABatchOf32) {
  const std::string dir = std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/model";
  const std::vector<Case> cases = make_cases(dir, "float32");
  for (const int64_t chunk : {32, 100, 4096}) {
    SCOPED_TRACE(chunk);
    EngineOptions options;
    options.load.dtype = "float32";
    options.max_seqs = 32;
    options.max_batched_tokens = chunk;
    const auto engine = load(dir, options);
    run_all(*engine, cases, 4);
    expect_nothing_held(*engine);
  }
}

TEST_F(EngineTest, ACancelledRequestEndsOnceAndFreesAll) {
  const auto engine = load(make_dir("qwen2"), {});
  const auto prompt = std::make_shared<const Prompt>(engine->prompts().build_plain("on and on"));
  SamplingParams endless;
  endless.temperature = 0;
  endless.ignore_eos = true;
  const auto pending = std::make_shared<Pending>();
  std::promise<RequestId> id;
  const auto future = id.get_future().share();
  int tokens = 0;
  id.set_value(submit(*engine, prompt, endless, pending, [&] {
    if (++tokens == 3) engine->cancel(future.get());
  }));
  const auto result = pending->end.get_future().get();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->finish, FinishReason::kNone);
  EXPECT_GE(result->token_ids.size(), 3u);
  EXPECT_LE(result->token_ids.size(), 5u);
  engine->cancel(future.get());  // has no effect
  engine->cancel(RequestId{12345});
  expect_nothing_held(*engine);
}

TEST_F(EngineTest, StoppingEndsEveryRequest) {
  auto engine = load(make_dir("qwen2"), {.max_seqs = 2});
  const auto prompt = std::make_shared<const Prompt>(engine->prompts().build_plain("on and on"));
  SamplingParams endless;
  endless.ignore_eos = true;
  std::vector<std::shared_ptr<Pending>> all;
  for (int i = 0; i < 20; ++i) {
    all.push_back(std::make_shared<Pending>());
    submit(*engine, prompt, endless, all.back());
  }
  engine.reset();
  for (const auto& pending : all) EXPECT_EQ(pending->ends, 1);
}

TEST_F(EngineTest, EndsByLengthAtTheContextAndRefusesWhatIsLonger) {
  const auto engine = load(make_dir("qwen2"), {});
  SamplingParams endless;
  endless.temperature = 0;
  endless.ignore_eos = true;
  Prompt longest;
  longest.ids.assign(kMaxLen - 1, 65);
  const auto pending = std::make_shared<Pending>();
  submit(*engine, std::make_shared<const Prompt>(longest), endless, pending);
  const auto result = pending->end.get_future().get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->token_ids.size(), 1u);
  EXPECT_EQ(result->finish, FinishReason::kLength);
  longest.ids.push_back(65);
  const auto refused = std::make_shared<Pending>();
  submit(*engine, std::make_shared<const Prompt>(longest), endless, refused);
  EXPECT_THAT(std::string(refused->end.get_future().get().status().message()),
              testing::HasSubstr(std::to_string(kMaxLen)));
}

TEST_F(EngineTest, RefusesLimitsThatMakeNoSense) {
  const std::string dir = make_dir("qwen2");
  const auto refusal = [&](EngineOptions options) {
    options.load.device = test_device();
    const auto engine = load_engine(dir, options, clock());
    EXPECT_EQ(exit_code(engine.status()), 2);
    return std::string(engine.status().message());
  };
  EngineOptions options;
  options.kv_cache_bytes = 1000;
  EXPECT_THAT(refusal(options), testing::HasSubstr("lower --max-model-len, or raise --kv-cache-memory-bytes"));
  options = {};
  options.max_seqs = 100;
  options.max_batched_tokens = 99;
  EXPECT_THAT(refusal(options), testing::HasSubstr("--max-num-batched-tokens 99 is less than --max-num-seqs 100"));
  options = {};
  options.max_seqs = 0;
  EXPECT_THAT(refusal(options), testing::HasSubstr("--max-num-seqs must be between 1 and 65536, found 0"));
  options = {};
  options.record_path = root_ + "/no/such/folder/record";
  EXPECT_THAT(refusal(options), testing::HasSubstr("cannot write the record"));
}

// What the real engine decided can be decided again from its record.
TEST_F(EngineTest, ARecordedRunReplays) {
  const std::string dir = make_dir("qwen2_vl");
  const std::vector<Case> cases = make_cases(dir);
  EngineOptions options;
  options.record_path = root_ + "/record";
  options.max_batched_tokens = 64;
  options.max_seqs = 8;
  auto engine = load(dir, options);
  run_all(*engine, cases, 2);
  engine.reset();
  std::ifstream file(options.record_path);
  const std::string record((std::istreambuf_iterator<char>(file)), {});
  const auto report = replay(record);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->differing_line, 0) << report->recorded << "\n" << report->replayed;
  EXPECT_GT(report->decisions, 10);
}

}  // namespace
}  // namespace parvl
