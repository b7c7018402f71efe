// The engine's bfloat16 path on a GPU: fused layers, attention over pages, recorded decode steps. Skips without one.
#include <gmock/gmock.h>

#include <cmath>
#include <future>

#include "parvl/base/clock.h"
#include "parvl/base/rng.h"
#include "parvl/exec/decode_graphs.h"
#include "parvl/exec/encoder_graphs.h"
#include "parvl/exec/engine_load.h"
#include "parvl/exec/generator.h"
#include "parvl/exec/load.h"
#include "parvl/nn/device.h"
#include "tests/unit/models_fixture.h"

namespace parvl {
namespace {

const Clock& clock() {
  static const RealClock kClock;
  return kClock;
}

class GpuEngineTest : public ModelDirTest {
 protected:
  void SetUp() override {
    const auto device = select_device("cuda");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    ModelDirTest::SetUp();
  }

  // Heads of 64, grouped: what the kernels take.
  std::string make_dir(const std::string& family, int64_t heads, int64_t head_dim) {
    const std::string dir = make_folder(family);
    Json config = tiny_config(family);
    config.update({{"hidden_size", 256},
                   {"intermediate_size", 512},
                   {"num_hidden_layers", 3},
                   {"num_attention_heads", heads},
                   {"num_key_value_heads", 2},
                   {"head_dim", head_dim},
                   {"max_position_embeddings", 2048}});
    auto model = make_model(config);
    model->params().initialise(5, 0.06);
    const absl::Status status =
        save_weights(*model, dir, {.copy_from = std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/start"});
    if (!status.ok()) throw std::runtime_error(status.ToString());
    std::filesystem::remove(dir + "/preprocessor_config.json");
    return dir;
  }

  static std::unique_ptr<Engine> load(const std::string& dir, EngineOptions options) {
    options.load.device = "cuda";
    options.load.dtype = "bfloat16";
    auto engine = load_engine(dir, options, clock());
    if (!engine.ok()) throw std::runtime_error(engine.status().ToString());
    return *std::move(engine);
  }

  struct Request {
    std::vector<TokenId> prompt;
    SamplingParams sampling;
  };
  // Different lengths and ways of sampling.
  static std::vector<Request> make_requests(int count, int64_t tokens) {
    std::vector<Request> out;
    for (int i = 0; i < count; ++i) {
      Request r;
      for (int j = 0; j < 3 + i * 37; ++j) r.prompt.push_back(static_cast<TokenId>(1 + (i * 31 + j * 7) % 250));
      r.sampling.max_tokens = tokens + i;
      r.sampling.ignore_eos = true;
      r.sampling.logprobs = i % 4 != 3;
      r.sampling.temperature = i % 2 == 0 ? 0 : 0.9;
      r.sampling.seed = static_cast<uint64_t>(i);
      if (i % 5 == 2) r.sampling.top_p = 0.9;
      if (i % 5 == 3) r.sampling.top_logprobs = 3;
      if (i % 5 == 4) r.sampling.frequency_penalty = 0.3;
      out.push_back(std::move(r));
    }
    return out;
  }

  static std::vector<GenerateResult> run(Engine& engine, const std::vector<Request>& requests) {
    std::vector<std::promise<absl::StatusOr<GenerateResult>>> ends(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      auto prompt = std::make_shared<Prompt>();
      prompt->ids = requests[i].prompt;
      EngineRequest request;
      request.prompt = prompt;
      request.sampling = requests[i].sampling;
      request.on_token = [](const TokenEvent&) {};
      request.on_end = [&, i](const absl::StatusOr<GenerateResult>& result) { ends[i].set_value(result); };
      engine.submit(std::move(request));
    }
    std::vector<GenerateResult> out;
    for (auto& end : ends) {
      auto result = end.get_future().get();
      if (!result.ok()) throw std::runtime_error(result.status().ToString());
      out.push_back(*std::move(result));
    }
    return out;
  }
};

// Tensors of more than one of the buffers that they go through, and of less.
TEST_F(GpuEngineTest, LoadsTheBitsThatTheCpuLoads) {
  const std::string dir = make_folder("wide");
  Json config = tiny_config("qwen2_vl");
  config.update({{"vocab_size", 300'000}, {"tie_word_embeddings", true}});  // 38 MB in float32
  const auto written = write_tiny_model(dir, config);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const bool masters : {false, true}) {
      SCOPED_TRACE(testing::Message() << type << (masters ? " and masters" : ""));
      const auto on_cpu = make_model(config, type), on_gpu = Model::create(*parse_model_spec(config, "config"));
      on_gpu->params().allocate(type, select_device("cuda").value());
      for (const Model* model : {on_cpu.get(), on_gpu.get()}) {
        for (Param* param : model->params().owned()) {
          if (masters) param->master = at::empty(param->shape, param->value.options().dtype(at::kFloat));
        }
      }
      ASSERT_TRUE(parvl::load_weights(*on_cpu, dir).ok());
      ASSERT_TRUE(parvl::load_weights(*on_gpu, dir).ok());
      for (const Param* want : on_cpu->params().owned()) {
        const Param* got = on_gpu->params().find(want->name);
        EXPECT_TRUE(at::equal(got->value.cpu(), want->value)) << want->name;
        EXPECT_TRUE(at::equal(got->master.cpu(), want->master)) << want->name;
      }
    }
  }
}

class GpuEngineShapeTest : public GpuEngineTest,
                           public testing::WithParamInterface<std::tuple<const char*, int64_t, int64_t>> {};

// The log-probabilities that the engine gave its tokens, against float32 on the CPU after the same tokens.
TEST_P(GpuEngineShapeTest, LogprobsAreNearFloat32) {
  const auto& [family, heads, head_dim] = GetParam();
  const std::string dir = make_dir(family, heads, head_dim);
  const std::vector<Request> requests = make_requests(12, 10);
  auto engine = load(dir, {});
  const std::vector<GenerateResult> got = run(*engine, requests);
  const WorkCount decode = engine->stats().work[static_cast<size_t>(WorkKind::kDecode)];
  EXPECT_GT(decode.replayed, 0);
  EXPECT_EQ(decode.launched, 0);
  GeneratorOptions options;
  options.load.device = "cpu";
  options.load.dtype = "float32";
  auto generator = *Generator::load(dir, options);
  double difference = 0;
  int64_t count = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(static_cast<int64_t>(got[i].token_ids.size()), requests[i].sampling.max_tokens);
    Prompt prompt;
    prompt.ids = requests[i].prompt;
    for (size_t k = 0; k < got[i].logprobs.size(); ++k) {
      SamplingParams forced;  // nothing but this token can be chosen; its logprob is of the logits before the bias
      forced.temperature = 0;
      forced.logit_bias = {{got[i].token_ids[k], 100}};
      forced.max_tokens = 1;
      forced.ignore_eos = true;
      forced.logprobs = true;
      const GenerateResult want = *generator->generate(prompt, forced, nullptr);
      ASSERT_EQ(want.token_ids[0], got[i].token_ids[k]);
      difference += std::fabs(want.logprobs[0].logprob - got[i].logprobs[k].logprob);
      ++count;
      prompt.ids.push_back(got[i].token_ids[k]);
    }
  }
  ASSERT_GT(count, 80);
  std::printf("mean difference of log-probabilities %.4f\n", difference / static_cast<double>(count));
  EXPECT_LT(difference / static_cast<double>(count), 0.02);
}

// A replayed step is the step.
TEST_P(GpuEngineShapeTest, RecordedStepsEqualUnrecordedOnesToTheBit) {
  const auto& [family, heads, head_dim] = GetParam();
  LoadOptions load;
  load.device = "cuda";
  load.dtype = "bfloat16";
  const std::string dir = make_dir(family, heads, head_dim);
  auto files = *read_files(dir, load);
  ASSERT_TRUE(load_weights(files, dir, load).ok());
  use_own_stream(files.device);
  const BackboneSpec& spec = files.model->spec().backbone;
  constexpr int64_t kEach = 40, kBlocks = 16 * kEach;
  KvPages pages(spec, at::kBFloat16, files.device);
  pages.reserve(kBlocks);
  for (int64_t layer = 0; layer < spec.layers; ++layer) {
    at::Tensor(pages.keys(layer)).normal_();
    at::Tensor(pages.values(layer)).normal_();
  }
  auto recorded = DecodeGraphs::create(*files.model, pages, {16, kEach, /*record=*/true});
  auto unrecorded = DecodeGraphs::create(*files.model, pages, {16, kEach, /*record=*/false});
  ASSERT_NE(recorded, nullptr);
  std::vector<std::vector<int32_t>> blocks(16);
  for (size_t i = 0; i < blocks.size(); ++i) {
    for (int64_t b = 0; b < kEach; ++b) blocks[i].push_back(static_cast<int32_t>(b * 16 + static_cast<int64_t>(i)));
  }
  for (const size_t count : {1, 3, 8, 13, 16}) {
    std::vector<DecodeRow> rows;
    for (size_t i = 0; i < count; ++i) {
      DecodeRow row;
      row.length = static_cast<int64_t>(1 + i * 38);
      row.token = static_cast<int32_t>(i * 17 % 300);
      row.position = {row.length - 1, row.length - 1, row.length - 1};
      row.blocks = blocks[i].data();
      row.num_blocks = kEach;
      row.sample = {i % 2 == 0 ? 0.0 : 1.0, i, row.length, 1};
      rows.push_back(row);
    }
    const auto copy = [](absl::Span<const kernels::SampledRow> r) { return std::vector(r.begin(), r.end()); };
    const auto a = copy(recorded->run(rows)), b = copy(unrecorded->run(rows)), c = copy(recorded->run(rows));
    for (size_t i = 0; i < count; ++i) {
      EXPECT_EQ(a[i].token, b[i].token) << i << " of " << count;
      EXPECT_EQ(a[i].logprob, b[i].logprob) << i << " of " << count;
      EXPECT_EQ(a[i].logprob, c[i].logprob) << i << " of " << count;
      EXPECT_TRUE(at::equal(recorded->logits(i), unrecorded->logits(i))) << i << " of " << count;
    }
  }
}

// With too little memory for all, sequences lose their blocks and are computed again.
TEST_P(GpuEngineShapeTest, PreemptedRequestsEndWithAllTheirTokens) {
  const auto& [family, heads, head_dim] = GetParam();
  const std::string dir = make_dir(family, heads, head_dim);
  EngineOptions options;
  options.load.max_model_len = 512;
  options.kv_cache_bytes = int64_t{3} * 2 * 2 * head_dim * 2 * 700;  // about 700 tokens
  options.prefix_caching = false;
  auto engine = load(dir, options);
  const std::vector<Request> requests = make_requests(10, 60);
  const std::vector<GenerateResult> got = run(*engine, requests);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(static_cast<int64_t>(got[i].token_ids.size()), requests[i].sampling.max_tokens);
  }
  EXPECT_GT(engine->stats().preemptions, 0);
}

class GpuEncoderTest : public GpuEngineTest, public testing::WithParamInterface<const char*> {
 protected:
  struct Images {
    SequenceInput input;
    std::vector<std::vector<float>> pixels;
  };
  static Images make_images(const std::vector<Grid>& grids, int64_t patch_values) {
    Images out;
    Rng rng(7);
    for (const Grid& grid : grids) {
      auto& pixels = out.pixels.emplace_back(static_cast<size_t>(grid.patches() * patch_values));
      for (float& x : pixels) x = static_cast<float>(rng.uniform() * 4 - 2);
      out.input.images.push_back({0, grid});
    }
    for (const auto& pixels : out.pixels) out.input.pixels.push_back(pixels.data());
    return out;
  }
  static at::Tensor encode(const Model& model, const Images& images, at::Device device) {
    at::NoGradGuard no_grad;
    return encode_images(model, pack_images(model, {images.input}, device), device);
  }
};

// Replayed and launched one by one give the same bits, whatever was encoded before; both are near float32 on the CPU.
TEST_P(GpuEncoderTest, RecordedEncodingsEqualUnrecordedOnesToTheBit) {
  Json config = tiny_config(GetParam());
  const auto reference = make_model(config);
  reference->params().initialise(5, 0.15);
  const std::string dir = make_folder("model");
  ASSERT_TRUE(save_weights(*reference, dir, {}).ok());
  const auto model = Model::create(reference->spec());
  const at::Device device(at::kCUDA, 0);
  model->params().allocate(at::kBFloat16, device);
  ASSERT_TRUE(load_weights(*model, dir).ok());
  use_own_stream(device);
  EncoderGraphsOptions options;
  options.max_patches = 1024;
  auto recorded = EncoderGraphs::create(*model, device, options);
  options.record = false;
  auto unrecorded = EncoderGraphs::create(*model, device, options);
  ASSERT_NE(recorded, nullptr);
  const int64_t patch_values = model->spec().vision->patch_values();
  // Some fill a graph, some leave rows over; big after small and small after big.
  const std::vector<std::vector<Grid>> batches = {{{1, 16, 16}},
                                                  {{1, 2, 2}},
                                                  {{1, 32, 32}},
                                                  {{1, 6, 10}, {2, 4, 4}, {1, 12, 2}},
                                                  {{1, 14, 18}, {1, 14, 18}},
                                                  {{1, 10, 26}},
                                                  {{1, 16, 16}, {1, 14, 16}, {1, 12, 20}}};
  size_t taken = 0;
  for (const std::vector<Grid>& grids : batches) {
    const Images images = make_images(grids, patch_values);
    const auto a = recorded->run(images.input), b = unrecorded->run(images.input), c = recorded->run(images.input);
    ASSERT_EQ(b.size(), a.size());
    ASSERT_EQ(c.size(), a.size());
    if (a.empty()) continue;  // many small frames, whose places fill more of a graph than it may be too large
    ++taken;
    ASSERT_EQ(a.size(), grids.size());
    for (size_t i = 0; i < grids.size(); ++i) {
      EXPECT_TRUE(at::equal(a[i], b[i])) << i << " of " << grids.size();
      EXPECT_TRUE(at::equal(a[i], c[i])) << i << " of " << grids.size();
    }
    const at::Tensor want = encode(*reference, images, at::kCPU), plain = encode(*model, images, device);
    for (const at::Tensor& got : {at::cat(a, 0), plain}) {
      const at::Tensor difference = got.to(at::kCPU, at::kFloat) - want;
      EXPECT_LT(difference.norm().item<double>() / want.norm().item<double>(), 0.02);
    }
  }
  EXPECT_GE(taken + 1, batches.size());
  EXPECT_TRUE(recorded->run(make_images({{1, 34, 34}}, patch_values).input).empty());
}

INSTANTIATE_TEST_SUITE_P(Families, GpuEncoderTest, testing::Values("qwen2_vl", "qwen2_5_vl"));

INSTANTIATE_TEST_SUITE_P(Shapes, GpuEngineShapeTest,
                         testing::Values(std::tuple("qwen2", 4, 64), std::tuple("llama", 2, 128),
                                         std::tuple("qwen2", 14, 64)));

}  // namespace
}  // namespace parvl
