// Requests for an engine without an encoder: prompts without pixels, and the features of their images from an encode
// engine.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/exec_encoded_fixture.h"
#include "tests/unit/exec_engine_fixture.h"

namespace parvl {

using Sources = std::vector<std::shared_ptr<EncodedSource>>;

class GivenFeaturesTest : public EngineTest {
 protected:
  static EngineOptions llm_only(EngineOptions options = {}) {
    options.load.modules = {"llm_backbone"};
    return options;
  }
  static std::unique_ptr<EncodeEngine> load_encoder(const std::string& dir, EngineOptions options = {}) {
    options.load.device = test_device();
    auto engine = load_encode_engine(dir, options, clock());
    if (!engine.ok()) throw std::runtime_error(engine.status().ToString());
    return *std::move(engine);
  }

  // A prompt without pixels, and where its features are.
  struct Given {
    std::shared_ptr<const Prompt> prompt;
    Sources sources;
    std::vector<std::shared_ptr<HeldSource>> held;
    int fetches() const {
      int out = 0;
      for (const auto& one : held) out += one->fetches;
      return out;
    }
  };
  static Given give(EncodeEngine& encoder, const Prompt& prompt) {
    Given out;
    auto copy = std::make_shared<Prompt>(prompt);
    for (auto& image : copy->images) {
      out.held.push_back(encode(encoder, image));
      out.sources.push_back(out.held.back());
      image = outline(*image);
    }
    out.prompt = std::move(copy);
    return out;
  }

  static std::shared_ptr<Pending> start(Engine& engine, const Given& given, const SamplingParams& sampling,
                                        std::vector<TokenId> generated = {}, RequestId* id = nullptr) {
    auto pending = std::make_shared<Pending>();
    EngineRequest request;
    request.prompt = given.prompt;
    request.encoded = given.sources;
    request.sampling = sampling;
    request.generated = std::move(generated);
    request.on_token = [pending](const TokenEvent& event) { pending->text += event.text; };
    request.on_end = [pending](const absl::StatusOr<GenerateResult>& result) {
      EXPECT_EQ(++pending->ends, 1);
      pending->end.set_value(result);
    };
    const RequestId got = engine.submit(std::move(request));
    if (id != nullptr) *id = got;
    return pending;
  }
  static absl::StatusOr<GenerateResult> run(Engine& engine, const Given& given, const SamplingParams& sampling,
                                            std::vector<TokenId> generated = {}) {
    return start(engine, given, sampling, std::move(generated))->end.get_future().get();
  }

  static std::vector<Given> give_all(EncodeEngine& encoder, const std::vector<Case>& cases) {
    std::vector<Given> out;
    for (const Case& c : cases) out.push_back(give(encoder, *c.prompt));
    return out;
  }

  // All at once, `times` over.
  static void run_given(Engine& engine, const std::vector<Case>& cases, const std::vector<Given>& given, int times) {
    std::vector<std::pair<const Case*, std::shared_ptr<Pending>>> pending;
    for (int i = 0; i < times; ++i) {
      for (size_t c = 0; c < cases.size(); ++c) {
        pending.emplace_back(&cases[c], start(engine, given[c], cases[c].sampling));
      }
    }
    for (auto& [c, p] : pending) {
      const auto result = p->end.get_future().get();
      ASSERT_TRUE(result.ok()) << result.status();
      expect_equal(*result, c->want);
      EXPECT_EQ(p->text, result->text);
      EXPECT_EQ(result->encode_ms, 0);
    }
  }

  static int fetches(const std::vector<Given>& given) {
    int out = 0;
    for (const Given& one : given) out += one.fetches();
    return out;
  }
  // Of different images.
  static int different(const std::vector<Given>& given) {
    std::set<std::array<uint8_t, 32>> keys;
    for (const Given& one : given) {
      for (const auto& image : one.prompt->images) keys.insert(image->key);
    }
    return static_cast<int>(keys.size());
  }

  // The LLM alone, cut as `cut` says: features come from an encode engine, and the answers are the same.
  void expect_answers_from_features(const std::function<EngineOptions(EngineOptions)>& cut) {
    for (const std::string family : {"qwen2_vl", "qwen2_5_vl"}) {
      const std::string dir = make_dir(family);
      const std::vector<Case> cases = make_cases(dir);
      const auto encoder = load_encoder(dir);
      const auto given = give_all(*encoder, cases);
      EngineOptions options;
      options.max_batched_tokens = 24;
      options.max_seqs = 6;
      const auto engine = load(dir, cut(llm_only(options)));
      run_given(*engine, cases, given, 2);
      EXPECT_GE(fetches(given), different(given));
    }
  }

  static void expect_same_bits(const GenerateResult& got, const GenerateResult& want) {
    EXPECT_EQ(got.token_ids, want.token_ids);
    EXPECT_EQ(got.text, want.text);
    ASSERT_EQ(got.logprobs.size(), want.logprobs.size());
    for (size_t i = 0; i < got.logprobs.size(); ++i) {
      EXPECT_EQ(got.logprobs[i].logprob, want.logprobs[i].logprob) << "token " << i;
      EXPECT_EQ(got.logprobs[i].top, want.logprobs[i].top) << "token " << i;
    }
  }
};

}  // namespace parvl
