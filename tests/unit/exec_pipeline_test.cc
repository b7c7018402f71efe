// An engine whose LLM lies on the stages of a pipeline, against the plain generator, which is one process: the same
// answers; each rank holds its layers and no more; stages compute at the same time; a rank that is lost ends the
// engine.
#include <absl/strings/match.h>
#include <absl/strings/str_join.h>
#include <gmock/gmock.h>

#include <condition_variable>
#include <mutex>

#include "parvl/base/rng.h"
#include "parvl/exec/backbone_step.h"
#include "tests/unit/comm_around.h"
#include "tests/unit/exec_given_fixture.h"
#include "tests/unit/exec_ranks_fixture.h"

namespace parvl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Layout {
  std::string family;
  int64_t tensor = 1, stages = 2;
  int64_t layers = 2;
  bool tied = false;
};

std::string name_of(const Layout& layout) {
  return absl::StrCat(layout.family, "_tp", layout.tensor, "_pp", layout.stages, "_of_", layout.layers, "_layers",
                      layout.tied ? "_tied" : "");
}
void PrintTo(const Layout& layout, std::ostream* out) { *out << name_of(layout); }

class PipelineTest : public GivenFeaturesTest {
 protected:
  std::string make_layered(const std::string& family, int64_t layers, bool tied) {
    const std::string dir = make_folder(family + "_layered");
    Json config = tiny_config(family);
    config["num_hidden_layers"] = layers;
    config["tie_word_embeddings"] = tied;
    write_tiny_model(dir, config, {.copy_from = std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/start"});
    if (!config.contains("vision_config")) std::filesystem::remove(dir + "/preprocessor_config.json");
    return dir;
  }
};

class PipelineFamilyTest : public PipelineTest, public testing::WithParamInterface<Layout> {
 protected:
  std::string make_model_dir() { return make_layered(GetParam().family, GetParam().layers, GetParam().tied); }
  static EngineOptions over(EngineOptions options) {
    return over_stages(std::move(options), GetParam().tensor, GetParam().stages);
  }
};

TEST_P(PipelineFamilyTest, EqualsTheGeneratorHoweverItIsCutAndBatched) {
  const std::string dir = make_model_dir();
  const std::vector<Case> cases = make_cases(dir);
  // 7 tokens a step end inside images, and micro batches of one to three tokens inside of them; the last has steps that
  // are not cut.
  for (const auto& [chunk, seqs, cache, least] :
       {std::tuple{7, 3, true, 1}, std::tuple{50, 5, true, 8}, std::tuple{2048, 16, false, 1000}}) {
    SCOPED_TRACE(testing::Message() << chunk << " tokens a step, " << seqs << " sequences, cache " << cache);
    EngineOptions options;
    options.max_batched_tokens = chunk;
    options.max_seqs = seqs;
    options.prefix_caching = cache;
    options.micro_batch_tokens = least;
    const auto engine = load(dir, over(options));
    run_all(*engine, cases, 2);
    if (cache) run_all(*engine, cases, 1);  // warm
    expect_nothing_held(*engine);
    EXPECT_EQ(engine->stats().prefix_hits > 0, cache);
  }
}

TEST_P(PipelineFamilyTest, EqualsTheGeneratorUnderPreemption) {
  const std::string dir = make_model_dir();
  const std::vector<Case> cases = make_cases(dir);
  const BackboneSpec spec = load_model_spec(dir)->backbone;
  EngineOptions options;
  options.max_seqs = 12;
  options.max_batched_tokens = 64;
  // Hardly more than one sequence needs, on the stages with the most layers.
  const int64_t layers = (spec.layers + GetParam().stages - 1) / GetParam().stages;
  const BackboneSpec part = rank_backbone(spec, {GetParam().tensor, 0, StagePart{0, layers}});
  options.kv_cache_bytes = kv_bytes_a_token(part, DType::kFloat32) * 16 * (kMaxLen / 16 + 3);
  const auto engine = load(dir, over(options));
  EXPECT_EQ(engine->kv_tokens(), kMaxLen + 3 * 16);
  run_all(*engine, cases, 4);
  expect_nothing_held(*engine);
  EXPECT_GT(engine->stats().preemptions, 0);
}

TEST_P(PipelineFamilyTest, EachRankHoldsItsLayersAndNoMore) {
  const std::string dir = make_model_dir();
  const auto& [family, tensor, stages, layers, tied] = GetParam();
  constexpr int64_t kBlocks = 7;
  const LoadOptions options{.device = "cpu", .modules = {"llm_backbone"}};
  LoadedFiles whole = *read_files(dir, options);
  ASSERT_TRUE(load_weights(whole, dir, options).ok());
  const ModelSpec& spec = whole.model->spec();
  const auto parts = *split_layers(layers, stages);
  std::mutex mutex;
  std::map<std::string, int64_t> held_by;
  std::atomic<int64_t> kv_layers = 0;
  run_local_world(tensor * stages, {}, [&](Communicator& communicator) {
    LoadedFiles files = *read_files(dir, options);
    ASSERT_TRUE(cut_backbone(files, communicator, stages).ok());
    ASSERT_TRUE(load_weights(files, dir, options).ok());
    const StagePart part = parts[static_cast<size_t>(communicator.rank() / tensor)];
    EXPECT_EQ(files.rank.stage, part);
    EXPECT_EQ(files.rank.rank, communicator.rank() % tensor);
    const auto held = files.model->params().owned();
    EXPECT_EQ(static_cast<int64_t>(held.front()->value.storage().nbytes()),
              backbone_bytes(spec, files.dtype, {tensor, communicator.rank() % tensor, part}));
    for (const Param* param : held) {
      EXPECT_EQ(param->value.storage().data(), held.front()->value.storage().data()) << param->name;
      EXPECT_TRUE(at::equal(param->value, param->own_part(whole.model->params().find(param->name)->value)));
      std::lock_guard lock(mutex);
      ++held_by[param->name];
    }
    BackboneRunner runner(files, kBlocks, KvPages::kBlockSize);
    int64_t kv = 0;
    for (int64_t layer = part.first_layer; layer < part.first_layer + part.layers; ++layer) {
      kv += static_cast<int64_t>(runner.pages().keys(layer).nbytes() + runner.pages().values(layer).nbytes());
      if (communicator.rank() % tensor == 0) ++kv_layers;
    }
    EXPECT_EQ(runner.pages().spec().layers, part.layers);
    const BackboneSpec own = rank_backbone(spec.backbone, files.rank);
    EXPECT_EQ(kv, kBlocks * KvPages::kBlockSize * kv_bytes_a_token(own, files.dtype));
  });
  EXPECT_EQ(kv_layers, layers);
  for (const Param* param : whole.model->params().owned()) {
    const bool twice = tied && param->name == "llm_backbone.embed.weight";
    EXPECT_EQ(held_by[param->name], (twice ? 2 : 1) * tensor) << param->name;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, PipelineFamilyTest,
                         testing::Values(Layout{"llama"}, Layout{"qwen2"}, Layout{"qwen2_vl"}, Layout{"qwen2_5_vl"},
                                         Layout{"qwen2", 1, 3, 4, true}, Layout{"qwen2_vl", 1, 3, 3, true},
                                         Layout{"llama", 1, 3, 5}, Layout{"qwen2_5_vl", 1, 3, 4},
                                         Layout{"llama", 2, 2, 3}, Layout{"qwen2", 2, 2, 2, true},
                                         Layout{"qwen2_vl", 2, 2, 2}, Layout{"qwen2_5_vl", 2, 2, 3, true}),
                         [](const auto& info) { return name_of(info.param); });

// The LLM alone: features come from an encode engine, and go to the first stage.
TEST_F(PipelineTest, FeaturesFromElsewhereReachTheFirstStage) {
  expect_answers_from_features([](EngineOptions options) { return over_stages(std::move(options), 2, 2); });
}

// Makes the pipeline's stages wait for each other: what a stage has received it gets to compute only once the stage
// before has sent the micro batch after it, or has none. Stages in turn, one micro batch at a time, would wait for
// ever.
class Overlap {
 public:
  explicit Overlap(int64_t micro_batches) : micro_batches_(micro_batches) {}

  void sent(const std::string& group) {
    std::lock_guard lock(mutex_);
    ++sent_[group];
    changed_.notify_all();
  }
  // After the `count`-th message of a group has come.
  void received(const std::string& group, int64_t count) {
    std::unique_lock lock(mutex_);
    const int64_t next = count % micro_batches_ == 0 ? count : count + 1;
    const bool came = changed_.wait_for(lock, std::chrono::seconds(60), [&] { return sent_[group] >= next; });
    EXPECT_TRUE(came) << "while micro batch " << count << " of " << group << " waits, nobody computes the next one";
  }
  int64_t messages(const std::string& group) {
    std::lock_guard lock(mutex_);
    return sent_[group];
  }

 private:
  const int64_t micro_batches_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, int64_t> sent_;
};

class OverlapGroup : public GroupAround {
 public:
  OverlapGroup(std::unique_ptr<ProcessGroup> inner, Overlap& overlap)
      : GroupAround(std::move(inner)), overlap_(overlap) {}
  std::unique_ptr<Work> send(ConstBuffer values, int64_t to) override {
    overlap_.sent(name());
    return GroupAround::send(values, to);
  }
  std::unique_ptr<Work> receive(Buffer values, int64_t from) override {
    return work_then(GroupAround::receive(values, from), [this, count = ++received_] {
      if (absl::StrContains(name(), ".pp[")) overlap_.received(name(), count);
    });
  }

 private:
  Overlap& overlap_;
  int64_t received_ = 0;
};

TEST_F(PipelineTest, StagesComputeAtTheSameTime) {
  for (const int64_t stages : {2, 3}) {
    const std::string dir = make_layered("llama", 3, false);
    const auto prompts = *PromptBuilder::load(dir);
    auto prompt = std::make_shared<Prompt>(prompts->build_plain("what is it now, after all that was said before?"));
    // It goes in steps of 2 · stages tokens, each in `stages` micro batches; its answer is one token.
    const int64_t steps = static_cast<int64_t>(prompt->ids.size()) / (2 * stages);
    ASSERT_GT(steps, 1);
    prompt->ids.resize(static_cast<size_t>(steps * 2 * stages));
    SamplingParams one_token;
    one_token.max_tokens = 1;
    Overlap overlap(stages);
    RankWorld world;
    world.around = [&overlap](std::unique_ptr<Communicator> inner) {
      return around_groups(std::move(inner), [&overlap](std::unique_ptr<ProcessGroup> group) {
        return std::make_unique<OverlapGroup>(std::move(group), overlap);
      });
    };
    EngineOptions options;
    options.max_batched_tokens = 2 * stages;
    options.max_seqs = 1;
    options.micro_batch_tokens = 2;
    const auto engine = load(dir, over_stages(options, 1, stages, world));
    const auto pending = std::make_shared<Pending>();
    submit(*engine, prompt, one_token, pending);
    ASSERT_TRUE(pending->end.get_future().get().ok());
    EXPECT_EQ(overlap.messages("llm_backbone.pp[0].0>1"), steps * stages);
    EXPECT_EQ(overlap.messages("llm_backbone.logits"), 1) << "of the one step that chooses a token";
  }
}

TEST_F(PipelineTest, MoreStagesThanLayersAreRefusedBeforeAnyRankStarts) {
  const std::string dir = make_dir("qwen2");
  EngineOptions options = over_stages({}, 1, 3);
  options.start_ranks = []() -> absl::StatusOr<std::unique_ptr<EngineRanks>> {
    ADD_FAILURE() << "ranks were started";
    return absl::InternalError("");
  };
  const auto engine = load_engine(dir, options, clock());
  EXPECT_EQ(exit_code(engine.status()), 2);
  EXPECT_EQ(std::string(engine.status().message()),
            "--pipeline-parallel-size (3) must not be above the 2 layers of llm_backbone");
}

// A stage that needs more than its share, though the first one does not: the last has the head.
TEST_F(PipelineTest, EveryStageIsHeldAgainstItsMemory) {
  const std::string dir = make_dir("qwen2");
  const ModelSpec spec = *load_model_spec(dir);
  const auto parts = *split_layers(spec.backbone.layers, 2);
  EngineOptions options = over_stages({.max_seqs = 1, .max_batched_tokens = 16}, 1, 2);
  options.load.max_model_len = kMaxLen;
  options.load.memory_limit_bytes = backbone_bytes(spec, DType::kFloat32, {1, 0, parts[1]});  // for both
  options.start_ranks = []() -> absl::StatusOr<std::unique_ptr<EngineRanks>> {
    ADD_FAILURE() << "ranks were started";
    return absl::InternalError("");
  };
  const auto engine = load_engine(dir, options, clock());
  EXPECT_EQ(exit_code(engine.status()), 2);
  EXPECT_THAT(std::string(engine.status().message()), HasSubstr("of the CPU's memory for each of 2 ranks may be used"));
}

TEST_F(PipelineTest, ALostRankEndsTheEngineAndNothingHangs) {
  EngineRanks* ranks = nullptr;
  RankThreads* threads = nullptr;
  EngineOptions options = over_stages({.max_seqs = 4}, 1, 2, {{}, &threads});
  options.start_ranks = [start = options.start_ranks, &ranks]() {
    auto out = start();
    ranks = out->get();
    return out;
  };
  auto engine = load(make_dir("qwen2"), options);
  threads->expect_failure = true;
  SamplingParams endless;
  endless.ignore_eos = true;
  const auto prompt = std::make_shared<const Prompt>(engine->prompts().build_plain("on and on"));
  const auto pending = std::make_shared<Pending>();
  std::promise<void> running;
  submit(*engine, prompt, endless, pending, [&running, tokens = std::make_shared<int>(0)] {
    if (++*tokens == 5) running.set_value();
  });
  running.get_future().get();
  ranks->lose(absl::InternalError("rank 1 was ended by SIGKILL"));
  const absl::Status end = pending->end.get_future().get().status();
  EXPECT_TRUE(absl::IsUnavailable(end)) << end;
  EXPECT_THAT(std::string(end.message()), HasSubstr("rank 1 was ended by SIGKILL"));
  EXPECT_TRUE(absl::IsUnavailable(engine->health()));
}

TEST(BackboneRanks, GroupsOfALayout) {
  const auto text = [](int64_t tensor, int64_t stages) {
    std::vector<std::string> out;
    for (const GroupSpec& group : plan_backbone_ranks(tensor, stages).groups) {
      out.push_back(absl::StrCat(group.name, " ", absl::StrJoin(group.ranks, " ")));
    }
    return out;
  };
  EXPECT_THAT(text(2, 1), ElementsAre("llm_backbone.tp[0] 0 1"));
  EXPECT_THAT(text(1, 3),
              ElementsAre("llm_backbone.pp[0].0>1 0 1", "llm_backbone.pp[0].1>2 1 2", "llm_backbone.logits 0 2"));
  EXPECT_THAT(text(2, 2), ElementsAre("llm_backbone.tp[0] 0 1", "llm_backbone.tp[1] 2 3", "llm_backbone.pp[0].0>1 0 2",
                                      "llm_backbone.pp[1].0>1 1 3", "llm_backbone.logits 0 2"));
}

TEST(MicroBatches, AsManyAsThereAreStagesButNoneTooSmall) {
  for (const auto& [tokens, stages, least, want] :
       {std::tuple{1, 2, 1, 1}, std::tuple{2, 2, 1, 2}, std::tuple{100, 3, 1, 3}, std::tuple{63, 2, 32, 1},
        std::tuple{64, 2, 32, 2}, std::tuple{95, 4, 32, 2}, std::tuple{2048, 4, 32, 4}, std::tuple{5, 1, 1, 1}}) {
    EXPECT_EQ(count_micro_batches(tokens, stages, least), want) << tokens << " " << stages << " " << least;
  }
}

TEST(MicroBatches, CutAStepAnywhere) {
  BackboneStep step;
  step.sequences = {{{4, 9}, 16, 1}, {{1}, 0, 5}, {{7}, 3, 1}};
  for (int64_t i = 0; i < 7; ++i) {
    step.ids.push_back(10 + i);
    step.positions.push_back({i, i + 1, i + 2});
  }
  step.visual_rows = {2, 3, 4};
  step.sample_rows = {0, 5, 6};
  step.micro_batches = 2;
  const BackboneStep first = micro_batch_of(step, 0), second = micro_batch_of(step, 1);
  EXPECT_THAT(first.ids, ElementsAre(10, 11, 12));
  EXPECT_THAT(second.ids, ElementsAre(13, 14, 15, 16));
  EXPECT_EQ(second.positions.front(), (std::array<int64_t, 3>{3, 4, 5}));
  ASSERT_EQ(first.sequences.size(), 2u);
  ASSERT_EQ(second.sequences.size(), 2u);
  // Of the second sequence the first two tokens, then the other three behind them.
  EXPECT_THAT(first.sequences[1].blocks, ElementsAre(1));
  EXPECT_EQ(first.sequences[1].begin, 0);
  EXPECT_EQ(first.sequences[1].count, 2);
  EXPECT_EQ(second.sequences[0].begin, 2);
  EXPECT_EQ(second.sequences[0].count, 3);
  EXPECT_EQ(second.sequences[1].begin, 3);
  EXPECT_THAT(first.visual_rows, ElementsAre(2));
  EXPECT_THAT(second.visual_rows, ElementsAre(0, 1));
  EXPECT_THAT(first.sample_rows, ElementsAre(0));
  EXPECT_THAT(second.sample_rows, ElementsAre(2, 3));
}

// Whatever the step and the cut: every token once, in order, each at its place in its sequence.
TEST(MicroBatches, HoldTheWholeStep) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(seed);
    BackboneStep step;
    std::vector<std::pair<int32_t, int64_t>> places;  // of each token: its sequence's block, its index
    for (int64_t s = 0, sequences = 1 + static_cast<int64_t>(rng.below(6)); s < sequences; ++s) {
      const auto begin = static_cast<int64_t>(rng.below(20)), count = 1 + static_cast<int64_t>(rng.below(9));
      step.sequences.push_back({{static_cast<int32_t>(s)}, begin, count});
      for (int64_t i = 0; i < count; ++i) {
        const auto row = static_cast<int64_t>(step.ids.size());
        if (rng.below(3) == 0) step.visual_rows.push_back(row);
        if (i + 1 == count) step.sample_rows.push_back(row);
        step.ids.push_back(row);
        step.positions.push_back({row, row, row});
        places.emplace_back(static_cast<int32_t>(s), begin + i);
      }
    }
    const auto tokens = static_cast<int64_t>(step.ids.size());
    step.micro_batches = count_micro_batches(tokens, 1 + static_cast<int64_t>(rng.below(5)), 1);
    std::vector<int64_t> ids, visual, sampled;
    std::vector<std::pair<int32_t, int64_t>> got;
    for (int64_t i = 0; i < step.micro_batches; ++i) {
      const BackboneStep part = micro_batch_of(step, i);
      EXPECT_LE(part.ids.size(), static_cast<size_t>((tokens + step.micro_batches - 1) / step.micro_batches));
      const auto base = static_cast<int64_t>(ids.size());
      ids.insert(ids.end(), part.ids.begin(), part.ids.end());
      for (const int64_t row : part.visual_rows) visual.push_back(base + row);
      for (const int64_t row : part.sample_rows) sampled.push_back(base + row);
      for (const PagedSequence& sequence : part.sequences) {
        for (int64_t k = 0; k < sequence.count; ++k) got.emplace_back(sequence.blocks.front(), sequence.begin + k);
      }
    }
    EXPECT_EQ(ids, step.ids);
    EXPECT_EQ(visual, step.visual_rows);
    EXPECT_EQ(sampled, step.sample_rows);
    EXPECT_EQ(got, places);
  }
}

}  // namespace
}  // namespace parvl
