// An engine whose LLM is cut over ranks against the plain generator, which is one process: the same answers however
// requests are cut, batched, cached, preempted or moved; each rank holds its part and no more; a rank that is lost
// ends the engine.
#include <gmock/gmock.h>

#include "parvl/exec/backbone_step.h"
#include "parvl/exec/generator.h"
#include "parvl/media/json_schema.h"
#include "tests/unit/exec_given_fixture.h"
#include "tests/unit/exec_ranks_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

struct Cut {
  std::string family;
  int64_t ranks;
  bool odd = false;  // six heads, three key heads, a vocabulary that no number of ranks divides
};

std::string name_of(const Cut& cut) { return absl::StrCat(cut.family, "_over_", cut.ranks, cut.odd ? "_odd" : ""); }
void PrintTo(const Cut& cut, std::ostream* out) { *out << name_of(cut); }

class TensorParallelTest : public GivenFeaturesTest {
 protected:
  std::string make_cut_dir(const Cut& cut) {
    if (!cut.odd) return make_dir(cut.family);
    const std::string dir = make_folder(cut.family + "_odd");
    Json config = tiny_config(cut.family);
    config.update({{"hidden_size", 48},
                   {"num_attention_heads", 6},
                   {"num_key_value_heads", 3},
                   {"intermediate_size", 36},
                   {"vocab_size", 385},
                   {"tie_word_embeddings", true}});
    const char* const out = cut.family == "qwen2_vl" ? "hidden_size" : "out_hidden_size";
    if (config.contains("vision_config")) config["vision_config"][out] = 48;
    write_tiny_model(dir, config, {.copy_from = std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/start"});
    if (!config.contains("vision_config")) std::filesystem::remove(dir + "/preprocessor_config.json");
    return dir;
  }

  // Hardly more than one sequence needs, of a rank's bytes.
  static int64_t tight(const std::string& dir, int64_t ranks) {
    const BackboneSpec part = rank_backbone(load_model_spec(dir)->backbone, {ranks});
    return kv_bytes_a_token(part, DType::kFloat32) * 16 * (kMaxLen / 16 + 3);
  }
};

class TensorParallelFamilyTest : public TensorParallelTest, public testing::WithParamInterface<Cut> {};

TEST_P(TensorParallelFamilyTest, EqualsTheGeneratorHoweverItIsCutAndBatched) {
  const std::string dir = make_cut_dir(GetParam());
  const std::vector<Case> cases = make_cases(dir);
  // 7 and 16 tokens a step end inside images; 1 sequence has fewer rows than there are ranks.
  for (const auto& [chunk, seqs, cache] :
       {std::tuple{7, 3, true}, std::tuple{16, 1, false}, std::tuple{50, 5, true}, std::tuple{2048, 16, false}}) {
    SCOPED_TRACE(testing::Message() << chunk << " tokens a step, " << seqs << " sequences, cache " << cache);
    EngineOptions options;
    options.max_batched_tokens = chunk;
    options.max_seqs = seqs;
    options.prefix_caching = cache;
    const auto engine = load(dir, over_ranks(options, GetParam().ranks));
    run_all(*engine, cases, 2);
    if (cache) run_all(*engine, cases, 1);  // warm
    expect_nothing_held(*engine);
    EXPECT_EQ(engine->stats().prefix_hits > 0, cache);
  }
}

TEST_P(TensorParallelFamilyTest, EqualsTheGeneratorUnderPreemption) {
  const std::string dir = make_cut_dir(GetParam());
  const std::vector<Case> cases = make_cases(dir);
  EngineOptions options;
  options.max_seqs = 12;
  options.max_batched_tokens = 64;
  options.kv_cache_bytes = tight(dir, GetParam().ranks);
  const auto engine = load(dir, over_ranks(options, GetParam().ranks));
  run_all(*engine, cases, 3);
  expect_nothing_held(*engine);
  EXPECT_GT(engine->stats().preemptions, 0);
}

TEST_P(TensorParallelFamilyTest, EachRankHoldsItsPartAndNoMore) {
  const std::string dir = make_cut_dir(GetParam());
  const int64_t ranks = GetParam().ranks, blocks = 7;
  for (const std::string dtype : {"float32", "bfloat16"}) {
    LoadOptions whole_options{.device = "cpu", .dtype = dtype};
    LoadedFiles whole = *read_files(dir, whole_options);
    ASSERT_TRUE(load_weights(whole, dir, whole_options).ok());
    const ModelSpec& spec = whole.model->spec();
    std::atomic<int64_t> bytes = 0;
    run_local_world(ranks, {}, [&](Communicator& communicator) {
      LoadOptions options = whole_options;
      if (communicator.rank() > 0) options.modules = {"llm_backbone"};
      LoadedFiles files = *read_files(dir, options);
      ASSERT_TRUE(cut_backbone(files, communicator).ok());
      ASSERT_TRUE(load_weights(files, dir, options).ok());
      const auto held = files.model->params().owned();
      const int64_t formula = backbone_bytes(spec, files.dtype, {ranks, communicator.rank()});
      const int64_t encoder = communicator.rank() > 0 ? 0 : weight_bytes(spec, files.dtype).of({true, false});
      EXPECT_EQ(static_cast<int64_t>(held.front()->value.storage().nbytes()), formula + encoder);
      bytes += formula;
      for (const Param* param : held) {
        EXPECT_EQ(param->value.storage().data(), held.front()->value.storage().data());
        EXPECT_TRUE(at::equal(param->value, param->own_part(whole.model->params().find(param->name)->value)))
            << param->name;
      }
      BackboneRunner runner(files, blocks, KvPages::kBlockSize);
      int64_t kv = 0;
      for (int64_t layer = 0; layer < spec.backbone.layers; ++layer) {
        kv += static_cast<int64_t>(runner.pages().keys(layer).nbytes() + runner.pages().values(layer).nbytes());
      }
      const BackboneSpec part = rank_backbone(spec.backbone, {ranks});
      EXPECT_EQ(kv, blocks * KvPages::kBlockSize * kv_bytes_a_token(part, files.dtype));
      EXPECT_EQ(part.kv_heads, std::max<int64_t>(1, spec.backbone.kv_heads / ranks));
    });
    // Norms, and key heads that several have, are there more than once.
    const int64_t one = weight_bytes(spec, whole.dtype).backbone;
    EXPECT_EQ(backbone_bytes(spec, whole.dtype, {}), one);
    EXPECT_GE(bytes, one);
    EXPECT_LT(bytes, 2 * one);
  }
}

INSTANTIATE_TEST_SUITE_P(Cuts, TensorParallelFamilyTest,
                         testing::Values(Cut{"llama", 2}, Cut{"qwen2", 2}, Cut{"qwen2_vl", 2}, Cut{"qwen2_5_vl", 2},
                                         Cut{"llama", 4}, Cut{"qwen2", 4}, Cut{"qwen2_vl", 4}, Cut{"qwen2_5_vl", 4},
                                         Cut{"llama", 3, true}, Cut{"qwen2_vl", 3, true}, Cut{"qwen2_5_vl", 3, true},
                                         Cut{"qwen2", 6, true}),
                         [](const auto& info) { return name_of(info.param); });

TEST_F(TensorParallelTest, AnAnswerGoesOnFromEveryToken) {
  const std::string dir = make_dir("qwen2_vl");
  const std::vector<Case> cases = make_cases(dir);
  EngineOptions options;
  options.max_seqs = 12;
  options.max_batched_tokens = 64;
  const auto engine = load(dir, over_ranks(options, 2));
  for (const size_t which : {1, 3}) {
    const Case& c = cases[which];
    std::vector<std::shared_ptr<Pending>> pending;
    for (size_t from = 0; from < c.want.token_ids.size(); ++from) {
      pending.push_back(std::make_shared<Pending>());
      const auto end = c.want.token_ids.begin() + static_cast<std::ptrdiff_t>(from);
      submit(*engine, c.prompt, c.sampling, pending.back(), {}, "", {c.want.token_ids.begin(), end});
    }
    for (size_t from = 0; from < pending.size(); ++from) {
      const auto result = pending[from]->end.get_future().get();
      ASSERT_TRUE(result.ok()) << result.status();
      expect_equal(*result, c.want, from);
    }
  }
}

TEST_F(TensorParallelTest, GrammarsHold) {
  const std::string dir = make_dir("llama");
  GeneratorOptions options;
  options.load.max_model_len = kMaxLen;
  auto generator = *Generator::load(dir, options);
  const OrderedJson schema = *supported_schema(
      OrderedJson::parse(R"({"type": "object", "properties": {"n": {"type": "integer"}, "words": {"type": "array",
                             "maxItems": 3, "items": {"type": "string", "maxLength": 9}}}, "required": ["n", "words"]})"),
      "schema");
  std::vector<Case> cases;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Case c;
    c.prompt = std::make_shared<const Prompt>(generator->prompts().build_plain("say it"));
    c.sampling.temperature = seed == 0 ? 0 : 1;
    c.sampling.seed = seed;
    c.sampling.max_tokens = 120;
    c.sampling.logprobs = c.sampling.ignore_eos = true;
    c.sampling.top_logprobs = 2;
    if (seed % 3 != 2) c.grammar = grammar_source(json_format(schema));
    c.want = *generator->generate(*c.prompt, c.sampling, nullptr,
                                  c.grammar.empty() ? nullptr : *generator->grammars().compile(c.grammar));
    cases.push_back(std::move(c));
  }
  const auto engine = load(dir, over_ranks({}, 2));
  run_all(*engine, cases, 2);
}

// The LLM alone: features come from an encode engine, and go to all ranks.
TEST_F(TensorParallelTest, FeaturesFromElsewhereReachAllRanks) {
  expect_answers_from_features([](EngineOptions options) { return over_ranks(std::move(options), 4); });
}

TEST_F(TensorParallelTest, ACutThatCannotBeIsRefusedBeforeAnyRankStarts) {
  const std::string dir = make_dir("qwen2");
  EngineOptions options = over_ranks({}, 3);
  options.start_ranks = []() -> absl::StatusOr<std::unique_ptr<EngineRanks>> {
    ADD_FAILURE() << "ranks were started";
    return absl::InternalError("");
  };
  const auto engine = load_engine(dir, options, clock());
  EXPECT_EQ(exit_code(engine.status()), 2);
  EXPECT_THAT(
      std::string(engine.status().message()),
      HasSubstr("--tensor-parallel-size (3) must divide the 4 attention heads of llm_backbone; valid here: 1, 2, 4"));
}

TEST_F(TensorParallelTest, ALostRankEndsTheEngineAndNothingHangs) {
  EngineRanks* ranks = nullptr;
  RankThreads* threads = nullptr;
  EngineOptions options = over_ranks({.max_seqs = 4}, 2, &threads);
  options.start_ranks = [start = options.start_ranks, &ranks]() {
    auto out = start();
    ranks = out->get();
    return out;
  };
  auto engine = load(make_dir("qwen2"), options);
  threads->expect_failure = true;
  EXPECT_TRUE(engine->health().ok());
  SamplingParams endless;
  endless.ignore_eos = true;
  const auto prompt = std::make_shared<const Prompt>(engine->prompts().build_plain("on and on"));
  std::vector<std::shared_ptr<Pending>> all;
  std::promise<void> running;
  for (int i = 0; i < 9; ++i) {
    all.push_back(std::make_shared<Pending>());
    submit(*engine, prompt, endless, all.back(), [&, i, tokens = std::make_shared<int>(0)] {
      if (i == 0 && ++*tokens == 5) running.set_value();
    });
  }
  running.get_future().get();
  ranks->lose(absl::InternalError("rank 1 was ended by SIGKILL"));
  for (const auto& pending : all) {
    const absl::Status end = pending->end.get_future().get().status();
    EXPECT_TRUE(absl::IsUnavailable(end)) << end;
    EXPECT_THAT(std::string(end.message()), HasSubstr("rank 1 was ended by SIGKILL"));
  }
  EXPECT_TRUE(absl::IsUnavailable(engine->health()));
  EXPECT_TRUE(absl::IsUnavailable(engine->accepts()));
  const auto late = std::make_shared<Pending>();
  submit(*engine, prompt, endless, late);
  EXPECT_TRUE(absl::IsUnavailable(late->end.get_future().get().status()));
  expect_nothing_held(*engine);
  engine.reset();
}

TEST(BackboneStep, ComesBackFromItsMessageAndFromNothingElse) {
  BackboneStep step;
  step.ids = {5, 6, 7};
  step.positions = {{0, 1, 2}, {3, 4, 5}, {6, 7, 8}};
  step.sequences = {{{4, 9}, 17, 2}, {{}, 0, 0}, {{3}, 0, 1}};
  step.visual_rows = {1};
  step.sample_rows = {0, 2};
  step.micro_batches = 3;
  const std::string message = to_message(step);
  const auto back = read_step(message);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->ids, step.ids);
  EXPECT_EQ(back->positions, step.positions);
  EXPECT_EQ(back->visual_rows, step.visual_rows);
  EXPECT_EQ(back->sample_rows, step.sample_rows);
  EXPECT_EQ(back->micro_batches, 3);
  EXPECT_FALSE(back->recorded);
  ASSERT_EQ(back->sequences.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(back->sequences[i].blocks, step.sequences[i].blocks);
    EXPECT_EQ(back->sequences[i].begin, step.sequences[i].begin);
    EXPECT_EQ(back->sequences[i].count, step.sequences[i].count);
  }
  for (size_t length = 0; length < message.size(); ++length) EXPECT_FALSE(read_step(message.substr(0, length)).ok());
  EXPECT_FALSE(read_step(message + "x").ok());
  for (size_t i = 0; i < message.size(); ++i) {  // the counts, which lie anywhere, among others
    std::string wrong = message;
    wrong[i] = '\x7f';
    (void)read_step(wrong);  // never more than the message has
  }
}

TEST(BackboneStep, ThatIsRecordedHasOneTokenOfEachSequence) {
  BackboneStep step;
  step.ids = {5, 6};
  step.positions = {{17, 18, 19}, {3, 3, 3}};
  step.sequences = {{{4, 9}, 17, 1}, {{3}, 3, 1}};
  step.recorded = true;
  const auto back = read_step(to_message(step));
  ASSERT_TRUE(back.ok());
  EXPECT_TRUE(back->recorded);
  const std::vector<DecodeRow> rows = decode_rows(*back);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].token, 5);
  EXPECT_EQ(rows[0].position, (std::array<int64_t, 3>{17, 18, 19}));
  EXPECT_EQ(rows[0].num_blocks, 2);
  EXPECT_EQ(rows[0].blocks[1], 9);
  EXPECT_EQ(rows[0].length, 18);
  EXPECT_EQ(rows[1].length, 4);
  step.sequences = {{{4, 9}, 17, 2}};
  EXPECT_FALSE(read_step(to_message(step)).ok());
}

}  // namespace
}  // namespace parvl
