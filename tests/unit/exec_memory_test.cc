// The formulas of plan/cost/memory.h against what is counted: every tensor of the CPU goes through a counting allocator
// while weights, pages, encoders and steps are made by the code that serves.
#include <ATen/Parallel.h>

#include <atomic>
#include <condition_variable>

#include "parvl/base/clock.h"
#include "parvl/comm/local/local_group.h"
#include "parvl/exec/backbone_step.h"
#include "parvl/exec/torch_executor.h"
#include "parvl/nn/stage.h"
#include "parvl/plan/cost/memory.h"
#include "tests/unit/counting_allocator.h"
#include "tests/unit/models_fixture.h"

namespace parvl {
namespace {

CountingAllocator& counter() {
  static CountingAllocator& allocator = *[] {
    auto* made = new CountingAllocator;  // tensors may outlive everything else
    c10::SetCPUAllocator(made, 100);
    return made;
  }();
  return allocator;
}

Json shape(const std::string& family, const Json& changes, const Json& vision_changes = Json::object()) {
  Json config = tiny_config(family);
  config["max_position_embeddings"] = 8192;
  config.update(changes);
  if (config.contains("vision_config")) config["vision_config"].update(vision_changes);
  if (config.contains("rope_scaling")) {
    const int64_t half = config["hidden_size"].get<int64_t>() / config["num_attention_heads"].get<int64_t>() / 2;
    config["rope_scaling"]["mrope_section"] = {half / 4, half / 4, half - 2 * (half / 4)};
  }
  return config;
}

struct Shape {
  std::string name;
  Json config;
};

std::vector<Shape> shapes() {
  std::vector<Shape> out;
  for (const std::string family : {"llama", "qwen2", "qwen2_vl", "qwen2_5_vl"}) {
    const bool windows = family == "qwen2_5_vl", vision = windows || family == "qwen2_vl";
    const auto width = [&](int64_t hidden, int64_t heads) {
      if (!vision) return Json::object();
      return windows ? Json{{"hidden_size", hidden}, {"num_heads", heads}, {"intermediate_size", 3 * hidden}}
                     : Json{{"embed_dim", hidden}, {"num_heads", heads}, {"mlp_ratio", 4}};
    };
    out.push_back({family + " small", shape(family, Json::object())});
    Json wide = {{"hidden_size", 256},       {"intermediate_size", 704}, {"num_attention_heads", 8},
                 {"num_key_value_heads", 2}, {"vocab_size", 5000},       {"tie_word_embeddings", true}};
    Json wide_vision = width(128, 4);
    if (windows) wide_vision["out_hidden_size"] = 256;
    if (vision && !windows) wide_vision["hidden_size"] = 256;
    out.push_back({family + " wide", shape(family, wide, wide_vision)});
    // More in the attention than in the MLP, and a head count without groups.
    Json square = {{"hidden_size", 128},       {"intermediate_size", 64}, {"num_attention_heads", 4},
                   {"num_key_value_heads", 4}, {"vocab_size", 30000},     {"num_hidden_layers", 3}};
    Json square_vision = width(96, 2);
    if (windows) square_vision["out_hidden_size"] = 128;
    if (vision && !windows) square_vision["hidden_size"] = 128;
    out.push_back({family + " square", shape(family, square, square_vision)});
  }
  // One layer of half a billion parameters.
  out.push_back({"qwen2 large", shape("qwen2", {{"hidden_size", 896},
                                                {"intermediate_size", 4864},
                                                {"num_attention_heads", 14},
                                                {"num_key_value_heads", 2},
                                                {"num_hidden_layers", 1}})});
  return out;
}

ModelSpec spec_of(const Json& config) {
  auto spec = parse_model_spec(config, "config");
  if (!spec.ok()) throw std::runtime_error(spec.status().ToString());
  return *spec;
}

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

TEST(Memory, WeightsAreExactByModule) {
  for (const Shape& one : shapes()) {
    for (const DType dtype : kTypes) {
      SCOPED_TRACE(one.name + " " + to_string(dtype));
      const auto model = Model::create(spec_of(one.config));
      const int64_t before = counter().live();
      model->params().allocate(to_scalar_type(dtype), at::kCPU);
      const WeightBytes formula = weight_bytes(model->spec(), dtype);
      EXPECT_EQ(counter().live() - before, formula.total());
      std::map<Module, int64_t> counted;
      for (const Param* param : model->params().owned()) {
        counted[param->module] += (param->numel() + 63) / 64 * 64 * dtype_bytes(dtype);
      }
      EXPECT_EQ(counted[Module::kVisionEncoder], formula.vision_encoder);
      EXPECT_EQ(counted[Module::kProjector], formula.projector);
      EXPECT_EQ(counted[Module::kBackbone], formula.backbone);
    }
  }
}

TEST(Memory, KvPagesAreExact) {
  for (const Shape& one : shapes()) {
    for (const DType dtype : kTypes) {
      SCOPED_TRACE(one.name + " " + to_string(dtype));
      const ModelSpec spec = spec_of(one.config);
      KvPages pages(spec.backbone, to_scalar_type(dtype), at::kCPU);
      const int64_t before = counter().live();
      pages.reserve(100);
      EXPECT_EQ(counter().live() - before, 100 * pages.block_size() * kv_bytes_a_token(spec.backbone, dtype));
    }
  }
}

// The executor that serves, driven by hand.
class Steps {
 public:
  Steps(const ModelSpec& spec, DType dtype) {
    LoadedFiles files;
    files.model = Model::create(spec);
    files.model->params().allocate(to_scalar_type(dtype), at::kCPU);
    files.model->params().initialise(3, 0.05);
    config_.num_blocks = 256;
    executor_ = make_torch_executor(std::move(files), config_, clock_);
    executor_->set_notify([this] {
      std::lock_guard lock(mutex_);
      come_ = true;
      changed_.notify_one();
    });
  }

  // A request with a prompt of so many tokens and, if `image` has patches, an image at its begin.
  RequestId begin(int64_t tokens, const ProcessedImage& image = {}) {
    auto prompt = std::make_shared<Prompt>();
    for (int64_t i = 0; i < tokens; ++i) prompt->ids.push_back(static_cast<TokenId>(i % 300));
    if (image.num_patches() > 0) {
      prompt->images.push_back(std::make_shared<const ProcessedImage>(image));
      prompt->media.push_back({0, 0, image.num_tokens()});
    }
    SamplingParams greedy;
    greedy.temperature = 0;
    const RequestId id{next_id_++};
    EngineRequest request;
    request.prompt = prompt;
    request.sampling = greedy;
    EXPECT_TRUE(executor_->begin(id, request).ok());
    return id;
  }

  // Blocks of its own for each sequence.
  SequenceWork work(RequestId id, int64_t begin, int64_t count, bool samples) {
    SequenceWork out{id, begin, count, samples, {}, {}};
    const int64_t blocks = (begin + count + config_.block_size - 1) / config_.block_size;
    for (int64_t i = 0; i < blocks; ++i) out.blocks.push_back(BlockId{static_cast<int32_t>(next_block_++ % 256)});
    return out;
  }

  int64_t peak_of(const SchedulerOutput& output) {
    return counter().peak_of([&] {
      executor_->submit(output);
      size_t expected = output.encodes.size() + !output.sequences.empty();
      while (expected > 0) {
        {
          std::unique_lock lock(mutex_);
          changed_.wait(lock, [this] { return come_; });
          come_ = false;
        }
        while (const auto completion = executor_->poll()) {
          EXPECT_TRUE(completion->status.ok()) << completion->status;
          --expected;
        }
      }
    });
  }

 private:
  RealClock clock_;
  SchedulerConfig config_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool come_ = false;
  int64_t next_id_ = 1, next_block_ = 0;
  std::unique_ptr<ModelExecutor> executor_;
};

// What libraries keep for a moment in each thread, however small the tensors are.
constexpr int kScratch = 64 << 10;

// An upper bound, and not a loose one. Ranks are not all at their worst at once, and for a number of tokens that they
// share evenly they need less.
void expect_bound(int64_t formula, int64_t counted, const std::string& what, int64_t ranks = 1) {
  EXPECT_GE(formula, counted) << what << ": more than the formula says, by "
                              << 100.0 * static_cast<double>(counted - formula) / static_cast<double>(counted) << " %";
  EXPECT_LE(static_cast<double>(formula), (ranks > 1 ? 1.8 : 1.6) * static_cast<double>(counted) +
                                              static_cast<double>(kScratch * ranks * at::get_num_threads()))
      << what << ": the formula says " << static_cast<double>(formula) / static_cast<double>(counted)
      << " times as much";
}

Target here() { return {false, at::get_num_threads()}; }

class MemoryOfSteps : public testing::TestWithParam<DType> {};

TEST_P(MemoryOfSteps, OneSequenceFromItsBegin) {
  for (const Shape& one : shapes()) {
    const ModelSpec spec = spec_of(one.config);
    Steps steps(spec, GetParam());
    for (const int64_t tokens : {64, 300, 1500}) {
      SchedulerOutput output;
      output.sequences.push_back(steps.work(steps.begin(tokens), 0, tokens, true));
      expect_bound(step_bytes(spec.backbone, GetParam(), {tokens, tokens, tokens, 0, 1}, here()), steps.peak_of(output),
                   one.name + ", " + std::to_string(tokens) + " tokens");
    }
  }
}

TEST_P(MemoryOfSteps, AChunkBehindAContext) {
  for (const Shape& one : shapes()) {
    const ModelSpec spec = spec_of(one.config);
    Steps steps(spec, GetParam());
    for (const auto& [begin, count] : std::vector<std::pair<int64_t, int64_t>>{{1000, 200}, {400, 700}, {2000, 33}}) {
      SchedulerOutput output;
      output.sequences.push_back(steps.work(steps.begin(begin + count), begin, count, true));
      expect_bound(step_bytes(spec.backbone, GetParam(), {count, count, begin + count, 0, 1}, here()),
                   steps.peak_of(output), one.name + ", " + std::to_string(count) + " after " + std::to_string(begin));
    }
  }
}

TEST_P(MemoryOfSteps, ManySequencesThatSample) {
  for (const Shape& one : shapes()) {
    const ModelSpec spec = spec_of(one.config);
    Steps steps(spec, GetParam());
    SchedulerOutput output;
    for (int i = 0; i < 32; ++i) output.sequences.push_back(steps.work(steps.begin(40), 39, 1, true));
    const StepShape shape{32, 1, 1, 0, 32};  // on the CPU these are not gathered
    expect_bound(step_bytes(spec.backbone, GetParam(), shape, here()), steps.peak_of(output),
                 one.name + ", 32 sequences");
    output.sequences.clear();
    for (int i = 0; i < 5; ++i) output.sequences.push_back(steps.work(steps.begin(200), 0, 200, true));
    expect_bound(step_bytes(spec.backbone, GetParam(), {1000, 200, 200, 0, 5}, here()), steps.peak_of(output),
                 one.name + ", 5 prompts");
  }
}

TEST_P(MemoryOfSteps, Images) {
  for (const Shape& one : shapes()) {
    const ModelSpec spec = spec_of(one.config);
    if (!spec.vision) continue;
    Steps steps(spec, GetParam());
    int64_t slot = 1;
    for (const auto& [rows, columns] : std::vector<std::pair<int, int>>{{8, 8}, {30, 22}, {64, 40}}) {
      ProcessedImage image;
      image.grid_t = 1;
      image.grid_h = rows;
      image.grid_w = columns;
      image.merge_size = static_cast<int>(spec.vision->merge);
      image.patch_floats = static_cast<int>(spec.vision->patch_values());
      image.patches.resize(static_cast<size_t>(image.num_patches() * image.patch_floats), 0.25f);
      const int64_t tokens = image.num_tokens() + 10;
      const RequestId id = steps.begin(tokens, image);
      SchedulerOutput encode;
      encode.encodes.push_back({SlotId{slot}, id, 0});
      expect_bound(encode_bytes(spec, GetParam(), image.num_patches(), here()), steps.peak_of(encode),
                   one.name + ", " + std::to_string(image.num_patches()) + " patches");
      SchedulerOutput output;
      output.sequences.push_back(steps.work(id, 0, tokens, true));
      output.sequences[0].media.push_back({0, SlotId{slot++}});
      const StepShape shape{tokens, tokens, tokens, image.num_tokens(), 1};
      expect_bound(step_bytes(spec.backbone, GetParam(), shape, here()), steps.peak_of(output),
                   one.name + ", its step");
    }
  }
}

// The ranks of a cut backbone, which are threads here: all of them together at once.
int64_t peak_over_ranks(const ModelSpec& spec, DType dtype, int64_t ranks, const BackboneStep& step,
                        int64_t stages = 1) {
  std::atomic<int64_t> peak = 0;
  run_local_world(ranks, {}, [&](Communicator& communicator) {
    LoadedFiles files;
    files.model = Model::create(spec);
    ASSERT_TRUE(cut_backbone(files, communicator, stages).ok());
    const bool tied = spec.backbone.tied;
    files.model->params().keep([&](const Param& param) {
      return param.module == Module::kBackbone && on_stage(param, tied, *files.rank.stage);
    });
    GroupSpec everybody{"everybody", {}};
    for (int64_t rank = 0; rank < ranks; ++rank) everybody.ranks.push_back(rank);
    const auto all = *communicator.join(everybody);
    files.model->params().allocate(to_scalar_type(dtype), at::kCPU);
    files.model->params().initialise(3, 0.05);
    BackboneRunner runner(files, 256, KvPages::kBlockSize);
    const auto all_here = [&] { EXPECT_TRUE(all->barrier()->wait().ok()); };
    const auto run = [&] {
      all_here();
      const at::Tensor logits = runner.run(step, {});
      const at::Tensor wide = logits.defined() ? logits.to(at::kCPU, at::kFloat) : logits;  // as for the sampler
      all_here();
    };
    all_here();
    if (communicator.rank() == 0) {
      peak = counter().peak_of(run);
    } else {
      run();
    }
  });
  return peak;
}

TEST_P(MemoryOfSteps, EachOfTheRanksOfACutBackbone) {
  at::set_num_threads(1);
  for (const Shape& one : shapes()) {
    const ModelSpec spec = spec_of(one.config);
    if (spec.vision || spec.backbone.heads % 4 != 0) continue;  // the backbones are the same
    for (const int64_t ranks : {2, 4}) {
      for (const int64_t tokens : {33, 300, 1500}) {
        BackboneStep step;
        step.sequences.push_back({{}, 0, tokens});
        for (int64_t i = 0; i < tokens; ++i) {
          step.ids.push_back(i % 300);
          step.positions.push_back({i, i, i});
          if (i % 16 == 0) step.sequences[0].blocks.push_back(static_cast<int32_t>(i / 16));
        }
        step.sample_rows = {tokens - 1};
        const StepShape shape{tokens, tokens, tokens, 0, 1, ranks};
        expect_bound(ranks * step_bytes(spec.backbone, GetParam(), shape, here()),
                     peak_over_ranks(spec, GetParam(), ranks, step),
                     absl::StrCat(one.name, ", ", tokens, " tokens on ", ranks, " ranks"), ranks);
        // One token each of many sequences, all of which sample.
        if (tokens != 300) continue;
        BackboneStep decode;
        for (int64_t i = 0; i < 32; ++i) {
          decode.sequences.push_back({{static_cast<int32_t>(i)}, 3, 1});
          decode.ids.push_back(i);
          decode.positions.push_back({3, 3, 3});
          decode.sample_rows.push_back(i);
        }
        expect_bound(ranks * step_bytes(spec.backbone, GetParam(), {32, 1, 1, 0, 32, ranks}, here()),
                     peak_over_ranks(spec, GetParam(), ranks, decode),
                     absl::StrCat(one.name, ", 32 sequences on ", ranks, " ranks"), ranks);
      }
    }
  }
}

// Micro batches need less than the whole step that the formula is for, so it is a bound and no more.
TEST_P(MemoryOfSteps, EachOfTheStagesOfAPipeline) {
  at::set_num_threads(1);
  for (const Shape& one : shapes()) {
    const ModelSpec spec = spec_of(one.config);
    if (spec.vision || spec.backbone.heads % 4 != 0 || spec.backbone.layers < 2) continue;
    for (const auto& [ranks, stages, micro_batches] : {std::tuple{2, 2, 1}, std::tuple{2, 2, 2}, std::tuple{4, 2, 2}}) {
      BackboneStep step;
      step.micro_batches = micro_batches;
      for (int64_t i = 0; i < 64; ++i) {
        step.sequences.push_back({{static_cast<int32_t>(i)}, 0, 10});
        for (int64_t k = 0; k < 10; ++k) {
          step.ids.push_back(i + k);
          step.positions.push_back({k, k, k});
        }
        step.sample_rows.push_back(10 * i + 9);
      }
      const int64_t bound = ranks * step_bytes(spec.backbone, GetParam(), {640, 10, 10, 0, 64, ranks / stages}, here());
      EXPECT_GE(bound, peak_over_ranks(spec, GetParam(), ranks, step, stages)) << one.name << ", " << stages;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, MemoryOfSteps, testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat64),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace parvl
