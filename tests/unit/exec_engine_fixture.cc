#include "tests/unit/exec_engine_fixture.h"

#include <utility>

#include "parvl/exec/generator.h"

namespace parvl {

std::shared_ptr<const ProcessedImage> EngineTest::image(const PromptBuilder& prompts, int width, int height, int seed) {
  Image out;
  out.width = width;
  out.height = height;
  for (int i = 0; i < width * height * 3; ++i) out.rgb.push_back(static_cast<uint8_t>((i + seed) * (37 + seed) % 251));
  auto processed = prompts.image_processor().process(out);
  if (!processed.ok()) throw std::runtime_error(processed.status().ToString());
  return std::make_shared<const ProcessedImage>(*std::move(processed));
}

Prompt EngineTest::chat(const PromptBuilder& prompts, const std::string& before, const std::string& after,
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

std::vector<Prompt> EngineTest::make_prompts(const PromptBuilder& prompts) {
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

std::vector<Case> EngineTest::make_cases(const std::string& dir, const std::string& dtype) {
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

RequestId EngineTest::submit(Engine& engine, const std::shared_ptr<const Prompt>& prompt,
                             const SamplingParams& sampling, const std::shared_ptr<Pending>& pending,
                             std::function<void()> on_token, const std::string& grammar,
                             std::vector<TokenId> generated) {
  EngineRequest request;
  if (!grammar.empty()) request.grammar = *engine.grammars().compile(grammar);
  request.prompt = prompt;
  request.sampling = sampling;
  request.generated = std::move(generated);
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

void EngineTest::run_all(Engine& engine, const std::vector<Case>& cases, int times) {
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

void EngineTest::expect_equal(const GenerateResult& got, const GenerateResult& want, size_t from) {
  ASSERT_EQ(got.logprobs.size(), got.token_ids.size());
  for (size_t i = from; i < want.token_ids.size(); ++i) {
    ASSERT_LT(i - from, got.token_ids.size());
    const TokenLogprob &a = got.logprobs[i - from], &b = want.logprobs[i];
    if (b.top[0].second - b.top[1].second < kMargin) return;
    EXPECT_NEAR(a.top[0].second, b.top[0].second, kLogprobTolerance) << "token " << i;
    ASSERT_EQ(got.token_ids[i - from], want.token_ids[i]) << "token " << i;
    EXPECT_NEAR(a.logprob, b.logprob, kLogprobTolerance) << "token " << i;
  }
  EXPECT_EQ(from + got.token_ids.size(), want.token_ids.size());
  EXPECT_EQ(got.finish, want.finish);
}

}  // namespace parvl
