// An answer that goes on in another engine, from each of its tokens: what comes is what would have come.
#include <gmock/gmock.h>

#include "parvl/exec/generator.h"
#include "parvl/media/grammar.h"
#include "parvl/media/json_schema.h"
#include "tests/unit/exec_engine_fixture.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

class ResumeTest : public EngineTest {
 protected:
  static std::shared_ptr<Pending> go_on(Engine& engine, const Case& c, size_t from) {
    auto pending = std::make_shared<Pending>();
    std::vector<TokenId> so_far(c.want.token_ids.begin(), c.want.token_ids.begin() + static_cast<std::ptrdiff_t>(from));
    submit(engine, c.prompt, c.sampling, pending, {}, c.grammar, std::move(so_far));
    return pending;
  }

  static absl::Status refusal(Engine& engine, const Case& c, const std::vector<TokenId>& so_far) {
    auto pending = std::make_shared<Pending>();
    submit(engine, c.prompt, c.sampling, pending, {}, c.grammar, so_far);
    return pending->end.get_future().get().status();
  }

  // What one engine says without a break, and the text that it had shown after each token.
  static std::vector<std::string> run(Engine& engine, Case& c) {
    auto pending = std::make_shared<Pending>();
    auto shown = std::make_shared<std::vector<std::string>>(1);
    submit(
        engine, c.prompt, c.sampling, pending, [pending, shown] { shown->push_back(pending->text); }, c.grammar);
    c.want = *pending->end.get_future().get();
    return *shown;
  }

  // From every token, all at once, in an engine that has to preempt for them.
  void expect_resumable(const std::string& dir, std::vector<Case> cases) {
    const auto first = load(dir, {});
    EngineOptions tight;
    tight.max_seqs = 12;
    tight.max_batched_tokens = 64;
    tight.kv_cache_bytes = 2 * 2 * 2 * 8 * 16 * 4 * (kMaxLen / 16 + 3);
    const auto second = load(dir, tight);
    for (Case& c : cases) {
      const std::vector<std::string> shown = run(*first, c);
      ASSERT_EQ(shown.size(), c.want.token_ids.size() + 1);
      std::vector<std::shared_ptr<Pending>> pending;
      for (size_t from = 0; from < c.want.token_ids.size(); ++from) pending.push_back(go_on(*second, c, from));
      for (size_t from = 0; from < pending.size(); ++from) {
        SCOPED_TRACE(absl::StrCat("from token ", from, " of ", pending.size()));
        const auto result = pending[from]->end.get_future().get();
        ASSERT_TRUE(result.ok()) << result.status();
        expect_equal(*result, c.want, from);
        EXPECT_EQ(result->prompt_tokens, static_cast<int64_t>(c.prompt->ids.size()));
        if (result->token_ids.size() + from == c.want.token_ids.size() &&
            result->token_ids.back() == c.want.token_ids.back()) {
          EXPECT_EQ(shown[from] + pending[from]->text, c.want.text);
          ++whole_;
        }
      }
    }
    EXPECT_GT(second->stats().preemptions, 0);
    expect_nothing_held(*second);
  }
  int64_t whole_ = 0;  // that came to the very same end
};

TEST_F(ResumeTest, SampledWithPenaltiesStopsAndImages) {
  const std::string dir = make_dir("qwen2_vl");
  std::vector<Case> cases = make_cases(dir);
  cases.resize(6);
  for (size_t i = 0; i < cases.size(); ++i) {
    SamplingParams& sampling = cases[i].sampling;
    sampling.temperature = 1;
    sampling.presence_penalty = 0.3;
    sampling.repetition_penalty = 1.2;
    if (i % 2 == 0) sampling.stop = {cases[i].want.text.substr(cases[i].want.text.size() / 2, 3), "never this"};
    if (i % 3 == 0) sampling.min_tokens = 20;
  }
  expect_resumable(dir, std::move(cases));
  EXPECT_GE(whole_, 60);
}

TEST_F(ResumeTest, WithinAGrammar) {
  const std::string dir = make_dir("qwen2");
  const OrderedJson schema = *supported_schema(
      OrderedJson::parse(R"({"type": "object", "properties": {"words": {"type": "array", "minItems": 2, "maxItems": 4,
                             "items": {"type": "string", "maxLength": 8}}, "n": {"enum": [1, 20, 300]}},
                             "required": ["words", "n"]})"),
      "schema");
  std::vector<Case> cases = make_cases(dir);
  cases.resize(2);
  for (Case& c : cases) {
    c.sampling.temperature = 1;
    c.sampling.max_tokens = 150;
    c.grammar = grammar_source(json_format(schema));
  }
  expect_resumable(dir, std::move(cases));
  EXPECT_GE(whole_, 20);
}

TEST_F(ResumeTest, RefusesWhatCannotGoOn) {
  const std::string dir = make_dir("qwen2");
  const auto engine = load(dir, {});
  Case c = make_cases(dir).front();
  EXPECT_THAT(std::string(refusal(*engine, c, c.want.token_ids).message()), HasSubstr("had ended with one of its"));
  EXPECT_THAT(std::string(refusal(*engine, c, {1'000'000}).message()),
              HasSubstr("token 1000000, which this model does not have"));
  c.grammar = grammar_source(json_format(*supported_schema(OrderedJson::parse(R"({"type": "integer"})"), "schema")));
  const TokenId brace = engine->prompts().tokenizer().encode("{", false).front();
  EXPECT_THAT(std::string(refusal(*engine, c, {brace}).message()), HasSubstr("not what its grammar allows"));
  expect_nothing_held(*engine);
}

}  // namespace
}  // namespace parvl
