// Generation on small random directories: limits, ends, cancelling, and tokens that depend on seed and position alone.
#include <gmock/gmock.h>

#include <limits>

#include "parvl/exec/generator.h"
#include "tests/unit/models_fixture.h"

namespace parvl {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// A millisecond passes at every look.
class SteppingClock : public Clock {
 public:
  int64_t now_ns() const override { return now_ += 1000000; }
  int64_t wall_ns() const override { return now_; }

 private:
  mutable int64_t now_ = 0;
};

class GeneratorTest : public ModelDirTest {
 protected:
  // A whole directory: weights of the family, the rest from the example's start.
  std::string make_dir(const std::string& family, const std::function<void(NamedTensors&)>& edit = {}) {
    const std::string dir = make_folder(family);
    write_tiny_model(dir, tiny_config(family),
                     {.copy_from = std::string(PARVL_SOURCE_DIR) + "/examples/easy_vqa/start"});
    if (family == "llama" || family == "qwen2") std::filesystem::remove(dir + "/preprocessor_config.json");
    if (edit) {
      NamedTensors tensors = read_safetensors(dir);
      edit(tensors);
      write_safetensors(dir + "/model.safetensors", tensors);
    }
    return dir;
  }

  static std::unique_ptr<Generator> load(const std::string& dir,
                                         GeneratorOptions options = {.load = {.device = "cpu"}}) {
    auto generator = Generator::load(dir, options);
    if (!generator.ok()) throw std::runtime_error(generator.status().ToString());
    return *std::move(generator);
  }

  static std::string refusal(const std::string& dir, GeneratorOptions options = {.load = {.device = "cpu"}}) {
    auto generator = Generator::load(dir, options);
    EXPECT_FALSE(generator.ok());
    EXPECT_EQ(exit_code(generator.status()), 2) << generator.status();
    return std::string(generator.status().message());
  }

  static void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

  static Prompt plain(std::vector<TokenId> ids) {
    Prompt prompt;
    prompt.ids = std::move(ids);
    return prompt;
  }

  // Random colours, 20 × 28 pixels: 3 × 4 merged patches at the example's sizes, or what the processor makes of it.
  static Prompt with_image(const Generator& generator) {
    Image image;
    image.width = 20;
    image.height = 28;
    for (int i = 0; i < image.width * image.height * 3; ++i) image.rgb.push_back(static_cast<uint8_t>(i * 37 % 251));
    auto processed = generator.prompts().image_processor().process(image);
    if (!processed.ok()) throw std::runtime_error(processed.status().ToString());
    auto prompt = generator.prompts().build({{"user",
                                              {{ContentPart::Kind::kText, "see", -1},
                                               {ContentPart::Kind::kImage, "", 0},
                                               {ContentPart::Kind::kText, "what color?", -1}}}},
                                            {std::make_shared<const ProcessedImage>(*std::move(processed))}, {});
    if (!prompt.ok()) throw std::runtime_error(prompt.status().ToString());
    return *std::move(prompt);
  }

  static SamplingParams sampled(double temperature, uint64_t seed, int64_t max_tokens) {
    SamplingParams params;
    params.temperature = temperature;
    params.seed = seed;
    params.max_tokens = max_tokens;
    params.ignore_eos = true;
    return params;
  }

  static GenerateResult generate(Generator& generator, const Prompt& prompt, const SamplingParams& params) {
    auto result = generator.generate(prompt, params, {});
    if (!result.ok()) throw std::runtime_error(result.status().ToString());
    return *std::move(result);
  }

  static std::string error(Generator& generator, const Prompt& prompt, const SamplingParams& params, int code = 2) {
    auto result = generator.generate(prompt, params, {});
    EXPECT_FALSE(result.ok());
    EXPECT_EQ(exit_code(result.status()), code) << result.status();
    return std::string(result.status().message());
  }
};

TEST_F(GeneratorTest, EventsAreTheResult) {
  const SteppingClock clock;
  auto generator = load(make_dir("qwen2"), {.load = {.device = "cpu"}, .clock = &clock});
  SamplingParams params = sampled(0, 0, 12);
  params.logprobs = true;
  params.top_logprobs = 3;
  std::vector<TokenEvent> events;
  const auto result = generator->generate(plain({5, 6, 7}), params, [&](const TokenEvent& event) {
    events.push_back(event);
    return true;
  });
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->prompt_tokens, 3);
  EXPECT_EQ(result->token_ids.size(), 12u);
  EXPECT_EQ(result->logprobs.size(), 12u);
  EXPECT_EQ(result->finish, FinishReason::kLength);
  EXPECT_DOUBLE_EQ(result->ttft_ms, 1);  // looked at when it begins and at every token
  EXPECT_DOUBLE_EQ(result->tpot_ms, 1);
  EXPECT_EQ(result->encode_ms, 0);
  std::string text;
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i].token_id, result->token_ids[i]);
    EXPECT_EQ(events[i].logprob.token_id, result->token_ids[i]);
    EXPECT_EQ(events[i].logprob.top.size(), 3u);
    EXPECT_EQ(events[i].logprob.top[0].first, result->token_ids[i]) << "greedy";
    EXPECT_EQ(events[i].finish, i + 1 == events.size() ? FinishReason::kLength : FinishReason::kNone);
    text += events[i].text;
  }
  EXPECT_EQ(text, result->text);
}

TEST_F(GeneratorTest, CancelEndsAfterThatToken) {
  auto generator = load(make_dir("qwen2"));
  int seen = 0;
  const auto result = generator->generate(plain({5}), sampled(0, 0, 50), [&](const TokenEvent&) { return ++seen < 4; });
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(seen, 4);
  EXPECT_EQ(result->token_ids.size(), 4u);
  EXPECT_EQ(result->finish, FinishReason::kNone);
  // The next request is not affected.
  EXPECT_EQ(generate(*generator, plain({5}), sampled(0, 0, 4)).token_ids, result->token_ids);
}

TEST_F(GeneratorTest, PromptsThatCannotBe) {
  auto generator = load(make_dir("qwen2"));
  EXPECT_EQ(generator->max_model_len(), 256);
  const SamplingParams params = sampled(0, 0, 3);
  EXPECT_THAT(error(*generator, plain({}), params), HasSubstr("empty"));
  EXPECT_THAT(error(*generator, plain({5, 384}), params), AllOf(HasSubstr("384"), HasSubstr("vocabulary")));
  EXPECT_THAT(error(*generator, plain({5, -1}), params), HasSubstr("-1"));
  EXPECT_THAT(error(*generator, plain(std::vector<TokenId>(256, 5)), params),
              AllOf(HasSubstr("256 tokens"), HasSubstr("at most 255")));
  EXPECT_THAT(error(*generator, plain(std::vector<TokenId>(10000, 5)), params), HasSubstr("10000"));
  const GenerateResult last = generate(*generator, plain(std::vector<TokenId>(255, 5)), params);
  EXPECT_EQ(last.token_ids.size(), 1u) << "room for one";
  EXPECT_EQ(last.finish, FinishReason::kLength);
}

TEST_F(GeneratorTest, ContextLimitOfTheCaller) {
  const std::string dir = make_dir("qwen2");
  auto generator = load(dir, {.load = {.device = "cpu", .max_model_len = 10}});
  EXPECT_EQ(generator->max_model_len(), 10);
  EXPECT_EQ(generate(*generator, plain({1, 2, 3}), sampled(0, 0, -1)).token_ids.size(), 7u) << "up to the context";
  EXPECT_THAT(error(*generator, plain(std::vector<TokenId>(10, 5)), sampled(0, 0, 1)), HasSubstr("limit is 10"));
  EXPECT_THAT(refusal(dir, {.load = {.device = "cpu", .max_model_len = 257}}),
              AllOf(HasSubstr("257"), HasSubstr("256")));
  EXPECT_THAT(refusal(dir, {.load = {.device = "cpu", .max_model_len = -1}}), HasSubstr("negative"));
}

TEST_F(GeneratorTest, SamplingFieldsAreChecked) {
  auto generator = load(make_dir("qwen2"));
  EXPECT_THAT(error(*generator, plain({5}), sampled(3, 0, 3)), HasSubstr("temperature"));
  EXPECT_THAT(error(*generator, plain({5}), sampled(0, 0, 0)), HasSubstr("max_tokens"));
  SamplingParams params = sampled(0, 0, 3);
  params.stop_token_ids = {384};
  EXPECT_THAT(error(*generator, plain({5}), params), HasSubstr("stop_token_ids"));
}

TEST_F(GeneratorTest, SeedDecidesTheTokens) {
  auto generator = load(make_dir("qwen2"));
  const Prompt prompt = plain({5, 60, 7});
  const auto first = generate(*generator, prompt, sampled(1.5, 3, 40)).token_ids;
  EXPECT_EQ(generate(*generator, prompt, sampled(1.5, 3, 40)).token_ids, first);
  EXPECT_NE(generate(*generator, prompt, sampled(1.5, 4, 40)).token_ids, first);
  EXPECT_EQ(generate(*load(root_ + "/qwen2"), prompt, sampled(1.5, 3, 40)).token_ids, first)
      << "a generator has no history";
}

// A request that moves continues from prompt + tokens so far; seed and position give the same tokens.
TEST_F(GeneratorTest, ContinuationOfAnyPrefixGivesTheSameTokens) {
  for (const char* family : {"llama", "qwen2", "qwen2_vl", "qwen2_5_vl"}) {
    SCOPED_TRACE(family);
    auto generator = load(make_dir(family), {.load = {.device = "cpu", .dtype = "float64"}});
    const bool vision = generator->prompts().has_images();
    const Prompt prompt = vision ? with_image(*generator) : plain({5, 60, 7, 300, 12});
    EXPECT_EQ(prompt.media.size(), vision ? 1u : 0u);
    const SamplingParams whole = sampled(1.2, 9, 40);
    const auto tokens = generate(*generator, prompt, whole).token_ids;
    ASSERT_EQ(tokens.size(), 40u);
    for (const size_t cut : {1, 2, 15, 16, 17, 39}) {
      Prompt longer = prompt;
      longer.ids.insert(longer.ids.end(), tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(cut));
      const auto rest = generate(*generator, longer, sampled(1.2, 9, 40 - static_cast<int64_t>(cut))).token_ids;
      EXPECT_EQ(rest, std::vector<TokenId>(tokens.begin() + static_cast<std::ptrdiff_t>(cut), tokens.end()))
          << "cut at " << cut;
    }
  }
}

TEST_F(GeneratorTest, ImagesChangeTheAnswerAndTakeTime) {
  const SteppingClock clock;
  auto generator = load(make_dir("qwen2_vl"), {.load = {.device = "cpu"}, .clock = &clock});
  Prompt prompt = with_image(*generator);
  SamplingParams params = sampled(0, 0, 1);
  params.logprobs = true;
  const GenerateResult result = generate(*generator, prompt, params);
  EXPECT_GT(result.encode_ms, 0);
  EXPECT_LE(result.encode_ms, result.ttft_ms);
  auto other = std::make_shared<ProcessedImage>(*prompt.images[0]);
  for (float& x : other->patches) x = -x;
  prompt.images[0] = other;
  EXPECT_GT(std::abs(generate(*generator, prompt, params).logprobs[0].logprob - result.logprobs[0].logprob), 1e-3);
}

TEST_F(GeneratorTest, EndsAndMinimumLength) {
  // A model that always says `token`: the output matrix has one large row, the last norm one constant direction.
  const auto always = [](TokenId token) {
    return [token](NamedTensors& tensors) {
      for (auto& [name, tensor] : tensors) {
        if (name == "lm_head.weight") {
          tensor.zero_();
          tensor[token].fill_(1);
          tensor[65].fill_(0.5);  // the second choice
        } else if (name == "model.embed_tokens.weight") {
          tensor.fill_(1);
        } else if (name.find("layers.") != std::string::npos && name.find("norm") == std::string::npos) {
          tensor.zero_();
        }
      }
    };
  };
  auto generator = load(make_dir("qwen2", always(370)));
  SamplingParams params = sampled(0, 0, 20);
  params.ignore_eos = false;
  GenerateResult result = generate(*generator, plain({5}), params);
  EXPECT_EQ(result.token_ids, std::vector<TokenId>{370});
  EXPECT_EQ(result.text, "");
  EXPECT_EQ(result.finish, FinishReason::kStop);
  params.min_tokens = 4;
  result = generate(*generator, plain({5}), params);
  EXPECT_EQ(result.token_ids, (std::vector<TokenId>{65, 65, 65, 65, 370}));
  EXPECT_EQ(result.finish, FinishReason::kStop);
  params.ignore_eos = true;
  params.min_tokens = 0;
  EXPECT_EQ(generate(*generator, plain({5}), params).token_ids, std::vector<TokenId>(20, 370));
  params.stop_token_ids = {370};
  EXPECT_EQ(generate(*generator, plain({5}), params).finish, FinishReason::kStop);
}

TEST_F(GeneratorTest, StopStringsCutTheText) {
  auto generator = load(make_dir("qwen2"));
  SamplingParams params = sampled(0, 0, 30);
  const GenerateResult whole = generate(*generator, plain({5, 6}), params);
  ASSERT_GT(whole.text.size(), 6u);
  size_t at = 3;  // a part of valid UTF-8
  while (at < whole.text.size() && (static_cast<unsigned char>(whole.text[at]) >= 0x80)) ++at;
  ASSERT_LT(at, whole.text.size());
  params.stop = {whole.text.substr(at, 1)};
  const GenerateResult cut = generate(*generator, plain({5, 6}), params);
  EXPECT_EQ(cut.text, whole.text.substr(0, whole.text.find(params.stop[0])));
  EXPECT_EQ(cut.finish, FinishReason::kStop);
  EXPECT_LT(cut.token_ids.size(), whole.token_ids.size());
}

TEST_F(GeneratorTest, BrokenWeightsAreAnErrorNotAToken) {
  for (const float broken : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    auto generator = load(make_dir("qwen2", [broken](NamedTensors& tensors) {
      for (auto& [name, tensor] : tensors) {
        if (name == "model.layers.1.mlp.down_proj.weight") tensor[3][4] = broken;
      }
    }));
    for (const double temperature : {0.0, 1.0}) {
      EXPECT_THAT(error(*generator, plain({5}), sampled(temperature, 0, 3), 1), Not(HasSubstr("\n")));
    }
  }
}

TEST_F(GeneratorTest, TypesOfADirectoryAndOfTheCaller) {
  const std::string dir = make_dir("qwen2_vl");
  auto reference = load(dir);
  const Prompt prompt = with_image(*reference);
  SamplingParams params = sampled(0, 0, 1);
  params.logprobs = true;
  const double want = generate(*reference, prompt, params).logprobs[0].logprob;
  for (const auto& [dtype, tolerance] : {std::pair{"float64", 1e-4}, std::pair{"float32", 1e-6},
                                         std::pair{"bfloat16", 0.5}, std::pair{"float16", 0.1}}) {
    auto generator = load(dir, {.load = {.device = "cpu", .dtype = dtype}});
    SamplingParams same = params;
    same.logit_bias[generate(*reference, prompt, params).token_ids[0]] = 50;  // the same token, whatever rounding says
    EXPECT_NEAR(generate(*generator, prompt, same).logprobs[0].logprob, want, tolerance) << dtype;
  }
  EXPECT_THAT(refusal(dir, {.load = {.device = "cpu", .dtype = "int8"}}), HasSubstr("int8"));
}

TEST_F(GeneratorTest, DefaultsOfTheDirectory) {
  const std::string dir = make_dir("qwen2");
  EXPECT_EQ(load(dir)->default_sampling().temperature, 0) << "do_sample is false";
  write(dir + "/generation_config.json",
        R"({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "do_sample": true,
                                             "eos_token_id": [370, 368]})");
  const SamplingParams params = load(dir)->default_sampling();
  EXPECT_EQ(params.temperature, 0.7);
  EXPECT_EQ(params.top_p, 0.8);
  EXPECT_EQ(params.top_k, 20);
  EXPECT_EQ(params.repetition_penalty, 1.05);
  for (const auto& [text, says] :
       {std::pair{R"({"temperature": "hot"})", "temperature"}, std::pair{R"({"temperature": 9})", "temperature"},
        std::pair{R"({"top_p": 0})", "top_p"}, std::pair{R"({"eos_token_id": "x"})", "eos_token_id"},
        std::pair{R"({"eos_token_id": [1, null]})", "eos_token_id"},
        std::pair{R"({"eos_token_id": 4294967666})", "eos_token_id"},  // 370 in 32 bits
        std::pair{R"({"eos_token_id": 384})",
                  "'eos_token_id' must be a token id or a list of them, from 0 to 383, found"},
        std::pair{R"({"eos_token_id": -1})", "eos_token_id"}, std::pair{"[]", "not a JSON object"},
        std::pair{"{", "not valid JSON"}}) {
    write(dir + "/generation_config.json", text);
    EXPECT_THAT(refusal(dir), AllOf(HasSubstr("generation_config.json"), HasSubstr(says))) << text;
  }
  std::filesystem::remove(dir + "/generation_config.json");
  EXPECT_EQ(load(dir)->default_sampling().temperature, 1);
}

TEST_F(GeneratorTest, DirectoriesWhosePartsDoNotFit) {
  EXPECT_THAT(refusal(root_ + "/nothing"), HasSubstr("nothing"));
  const std::string dir = make_dir("qwen2_vl");
  Json processor = Json::parse(std::ifstream(dir + "/preprocessor_config.json"));
  const auto with = [&](const char* key, int value) {
    Json changed = processor;
    changed[key] = value;
    write(dir + "/preprocessor_config.json", changed.dump());
    return refusal(dir);
  };
  EXPECT_THAT(with("patch_size", 14), AllOf(HasSubstr("patch_size"), HasSubstr("14"), HasSubstr("4 in the model")));
  EXPECT_THAT(with("merge_size", 1), HasSubstr("merge_size"));
  EXPECT_THAT(with("temporal_patch_size", 1), HasSubstr("temporal_patch_size"));
  const std::string text_only = make_dir("qwen2");
  write(text_only + "/preprocessor_config.json", processor.dump());
  EXPECT_THAT(refusal(text_only), AllOf(HasSubstr("image processor"), HasSubstr("text-only")));
  std::filesystem::remove(dir + "/model.safetensors");
  write(dir + "/preprocessor_config.json", processor.dump());
  EXPECT_THAT(refusal(dir), HasSubstr("model.safetensors"));
}

TEST_F(GeneratorTest, ADeviceThatIsNotThere) {
  EXPECT_THAT(refusal(make_dir("qwen2"), {.load = {.device = "tpu"}}), HasSubstr("auto, cpu, cuda"));
  EXPECT_EQ(load(root_ + "/qwen2")->device_name(), "cpu");
}

}  // namespace
}  // namespace parvl
