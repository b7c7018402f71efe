// The engine against the plain generator: the same tokens and log-probabilities however requests are cut, batched,
// cached or preempted; and its promises about ends.
#include <gmock/gmock.h>

#include "parvl/base/clock.h"
#include "parvl/exec/generator.h"
#include "parvl/media/grammar.h"
#include "parvl/media/json_schema.h"
#include "parvl/sched/record.h"
#include "tests/unit/exec_engine_fixture.h"

namespace parvl {
namespace {

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

TEST_F(EngineTest, TellsWhenItsEncoderBeginsAndIsDone) {
  std::vector<std::string> told;  // the encoder's thread
  EngineOptions options;
  options.hooks.on_encode = [&](int64_t patches) { told.push_back(absl::StrCat("begin ", patches)); };
  options.hooks.on_encoded = [&](int64_t patches, double seconds) {
    EXPECT_GE(seconds, 0);
    told.push_back(absl::StrCat("done ", patches));
  };
  auto engine = load(make_dir("qwen2_vl"), options);
  const auto picture = image(engine->prompts(), 56, 56, 1);
  const auto prompt = std::make_shared<const Prompt>(chat(engine->prompts(), "what", "is it?", {picture}));
  const auto pending = std::make_shared<Pending>();
  submit(*engine, prompt, {.max_tokens = 2}, pending);
  ASSERT_TRUE(pending->end.get_future().get().ok());
  engine.reset();
  EXPECT_THAT(told, testing::ElementsAre(absl::StrCat("begin ", picture->num_patches()),
                                         absl::StrCat("done ", picture->num_patches())));
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
