// What compiling and following grammars may cost, what the compiler keeps, and what stops it.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <atomic>
#include <cstdio>
#include <thread>

#include "parvl/base/check.h"
#include "parvl/media/grammar_limits.h"
#include "parvl/media/sandbox.h"
#include "tests/unit/byte_level_tokenizer.h"
#include "tests/unit/media_grammar_fixture.h"

namespace parvl {
namespace {

using testing::HasSubstr;

rusage used(int who) {
  rusage out{};
  PARVL_CHECK(getrusage(who, &out) == 0, "no figures of this process");
  return out;
}

// Of this thread: what the machine does beside it does not count.
double cpu_seconds() {
  const rusage own = used(RUSAGE_THREAD);
  return static_cast<double>(own.ru_utime.tv_sec + own.ru_stime.tv_sec) +
         static_cast<double>(own.ru_utime.tv_usec + own.ru_stime.tv_usec) * 1e-6;
}

void expect_bounded_peak() {
  int64_t most_kib = 1 << 20;
#if defined(PARVL_ADDRESS_SANITIZER)
  std::puts(
      "AddressSanitizer keeps freed memory back and puts room around each piece: the bound is 2 GiB in place of 1");
  most_kib *= 2;
#endif
  EXPECT_LT(used(RUSAGE_SELF).ru_maxrss, most_kib);
}

TEST_F(GrammarTest, KeepsWhatFitsAndForgetsTheOldest) {
  const auto one = compiler_->compile(*source_of(R"({"type":"integer"})"));
  ASSERT_TRUE(one.ok());
  GrammarLimits limits;
  limits.cache_bytes = (*one)->bytes() * 5 / 2;
  const auto compiler = make_compiler(limits);
  const auto source = [](int n) { return *source_of(absl::StrCat(R"({"title":")", n, R"(","type":"integer"})")); };
  for (int n = 0; n < 3; ++n) ASSERT_TRUE(compiler->compile(source(n)).ok());
  EXPECT_FALSE(compiler->find(source(0)).has_value());
  EXPECT_TRUE(compiler->find(source(2)).has_value());
  const auto kept = compiler->find(source(1));
  ASSERT_TRUE(kept.has_value());
  EXPECT_EQ(*compiler->compile(source(1)), **kept);
  ASSERT_TRUE(compiler->compile(source(3)).ok());
  EXPECT_TRUE(compiler->find(source(1)).has_value());  // used after 2
  EXPECT_FALSE(compiler->find(source(2)).has_value());
  EXPECT_LE(compiler->cached_bytes(), limits.cache_bytes);
}

TEST_F(GrammarTest, KeepsRefusalsTooAndNothingThatWasStopped) {
  GrammarLimits limits;
  limits.compile_steps = 1000;
  limits.cache_bytes = 4000;
  const auto compiler = make_compiler(limits);
  const auto source = [](int n) { return *source_of(absl::StrCat(R"({"title":")", n, R"(","type":"object"})")); };
  std::stop_source stopped;
  stopped.request_stop();
  EXPECT_TRUE(absl::IsCancelled(compiler->compile(source(0), stopped.get_token()).status()));
  EXPECT_FALSE(compiler->find(source(0)).has_value());
  const absl::Status refused = compiler->compile(source(0)).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  ASSERT_TRUE(compiler->find(source(0)).has_value());
  EXPECT_EQ(compiler->find(source(0))->status(), refused);
  EXPECT_EQ(compiler->compile(source(0), stopped.get_token()).status(), refused);  // nothing is compiled for it
  for (int n = 1; n < 100; ++n) EXPECT_FALSE(compiler->compile(source(n)).ok());
  EXPECT_FALSE(compiler->find(source(0)).has_value());
  EXPECT_TRUE(compiler->find(source(99)).has_value());
  EXPECT_LE(compiler->cached_bytes(), limits.cache_bytes);
}

TEST_F(GrammarTest, AStopIsHeardWithinASlice) {
  std::stop_source stop;
  const GrammarBudget budget(10'000'000, stop.get_token());
  const auto spend = [](int count) {
    for (int i = 0; i < count; ++i) spend_grammar_steps(1);
  };
  EXPECT_NO_THROW(spend(200'000));
  EXPECT_EQ(budget.spent(), 200'000);
  stop.request_stop();
  EXPECT_ANY_THROW(spend(100'000));
  EXPECT_ANY_THROW(spend(1));
}

TEST_F(GrammarTest, StopEndsACompilation) {
  GrammarLimits limits;
  limits.compile_steps = int64_t{1} << 50;  // for hours
  const auto compiler = make_compiler(limits);
  std::string properties;
  for (int i = 0; i < 500; ++i) {
    properties += absl::StrCat(i ? "," : "", "\"k", i, R"(":{"type":"string","pattern":"[a-z]{1,)", 400 + i,
                               "}|[a-z]{1,", 1400 + i, R"(}|(x?){1,1000}"})");
  }
  const std::string source = *source_of(R"({"type":"object","properties":{)" + properties + "}}");
  std::stop_source stop;
  absl::Status status;
  std::thread compiling([&] { status = compiler->compile(source, stop.get_token()).status(); });
  stop.request_stop();
  compiling.join();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
}

TEST_F(GrammarTest, ASourceOfTooManyBytesIsRefusedBeforeTheLibrarySeesIt) {
  const auto regex = [](const std::string& text) {
    return grammar_source(OrderedJson{{"type", "regex"}, {"pattern", text}});
  };
  const auto large = compiler_->compile(regex(repeated("ab", 4'000'000)));
  EXPECT_TRUE(absl::IsInvalidArgument(large.status()));
  EXPECT_THAT(std::string(large.status().message()), HasSubstr("bytes, over the limit of 524288"));
  EXPECT_FALSE(compiler_->find(regex(repeated("ab", 4'000'000))).has_value());
  EXPECT_EQ(check_pattern("a{4096}", "it"), absl::OkStatus());
  EXPECT_THAT(std::string(check_pattern("a{2,4097}", "it").message()), HasSubstr("it repeats something more than"));
  EXPECT_THAT(std::string(check_pattern(repeated("a", 200'000), "it").message()), HasSubstr("over the limit of 4096"));
  EXPECT_EQ(check_pattern(repeated("{", 4'000), "it"), absl::OkStatus());  // in linear time
}

// Printable characters, and pieces of two to four signs of JSON, whose place in a grammar is only known step by step.
std::shared_ptr<const Tokenizer> tokenizer_of_pieces() {
  Json vocab = Json::object();
  for (char c = 0x21; c < 0x7f; ++c) vocab[std::string(1, c)] = vocab.size();
  std::vector<std::string> pieces = {""};
  for (int length = 1; length <= 4; ++length) {
    std::vector<std::string> longer;
    for (const std::string& piece : pieces) {
      for (const char c : {'[', ']', '{', '}', ',', '1'}) longer.push_back(piece + c);
    }
    pieces = std::move(longer);
    for (const std::string& piece : pieces) {
      if (length > 1) vocab[piece] = vocab.size();
    }
  }
  return byte_level_tokenizer(vocab);
}

// The sequences of a step share its bound: those that are hard to follow fail, the others do not notice.
TEST_F(GrammarTest, AStepIsBoundedAsAWhole) {
  const auto tokenizer = tokenizer_of_pieces();
  std::string alike;
  for (int i = 0; i < 200; ++i) {
    alike += absl::StrCat(i ? "," : "", R"({"type":"array","items":{"type":"integer"},"minItems":)", i + 1, "}");
  }
  const std::string hard = *source_of(R"({"anyOf":[)" + alike + "]}"), easy = *source_of(R"({"type":"integer"})");
  struct Outcome {
    std::vector<absl::Status> statuses;  // of the hard ones, then the easy one
    int64_t steps = 0;
  };
  const auto run = [&](size_t hard_ones, int64_t token_steps) {
    GrammarLimits limits;
    limits.token_steps = token_steps;
    GrammarCompiler compiler(*tokenizer, {tokenizer->id_of("<end>")}, limits);
    std::vector<GrammarMatcher> matchers;
    std::vector<std::vector<uint32_t>> masks(hard_ones + 1);
    Outcome out;
    out.statuses.resize(hard_ones + 1);
    std::vector<MaskJob> jobs;
    for (size_t i = 0; i <= hard_ones; ++i) {
      matchers.emplace_back(*compiler.compile(i < hard_ones ? hard : easy));
      EXPECT_EQ(matchers[i].fill(masks[i]), absl::OkStatus());
      for (const char* token : {"[", "1"}) {
        if (i == hard_ones && *token != '1') continue;  // the easy one is a number alone
        EXPECT_EQ(matchers[i].accept(tokenizer->id_of(token)), absl::OkStatus());
      }
    }
    for (size_t i = 0; i <= hard_ones; ++i) jobs.push_back({&matchers[i], &masks[i], &out.statuses[i]});
    fill_masks(jobs);
    for (const GrammarMatcher& matcher : matchers) out.steps += matcher.last_steps();
    return out;
  };
  const std::vector<absl::Status> good(2);
  const Outcome unbound = run(1, GrammarLimits().token_steps);
  EXPECT_EQ(unbound.statuses, good);
  ASSERT_GT(unbound.steps, 10'000);
  EXPECT_EQ(run(1, 2 * unbound.steps).statuses, good);
  for (const size_t hard_ones : {1, 7}) {
    const int64_t bound = unbound.steps * 3 / 4;
    const Outcome tight = run(hard_ones, bound);
    for (size_t i = 0; i < hard_ones; ++i) {
      EXPECT_THAT(std::string(tight.statuses[i].message()), HasSubstr("following the grammar takes more than")) << i;
    }
    EXPECT_EQ(tight.statuses.back(), absl::OkStatus());
    EXPECT_LE(tight.steps, bound);
  }
}

TEST_F(GrammarTest, StopsAtTheLimitOfSteps) {
  GrammarLimits limits;
  limits.compile_steps = 1000;
  const auto compiled = make_compiler(limits)->compile(*source_of(R"({"type":"object"})"));
  EXPECT_THAT(std::string(compiled.status().message()), HasSubstr("takes more than the limit of 1000 steps"));
  limits = {};
  limits.token_steps = 3;
  const auto grammar = make_compiler(limits)->compile(*source_of(R"({"type":"object"})"));
  ASSERT_TRUE(grammar.ok());
  GrammarMatcher matcher(*grammar);
  absl::Status status;
  std::vector<uint32_t> mask;
  for (const char c : std::string_view(R"({"a":[[[1]]]})")) {
    status.Update(matcher.fill(mask));
    if (status.ok()) status.Update(matcher.accept(c));
  }
  EXPECT_THAT(std::string(status.message()), HasSubstr("limit of 3 steps a token"));
  limits = {};
  limits.grammar_bytes = 100;
  EXPECT_THAT(std::string(make_compiler(limits)->compile(*source_of("{}")).status().message()), HasSubstr("MiB"));
}

// Whatever a client sends, time and memory are bounded: it is compiled, or refused in one sentence.
TEST_F(GrammarTest, HostileSchemasCostLittle) {
  std::string words, counted, alike, loops;
  for (int i = 0; i < 3000; ++i) words += absl::StrCat(i ? "," : "", "\"word number ", i, " of many\"");
  for (int i = 0; i < 300; ++i) {
    counted += absl::StrCat(i ? "," : "", "\"k", i, R"(":{"type":"string"})");
    alike += absl::StrCat(i ? "," : "", R"({"type":"object","properties":{"a":{"type":"string"},"b)", i,
                          R"(":{"type":"integer"}},"required":["a"]})");
  }
  for (int i = 0; i < 60; ++i) {
    loops += absl::StrCat(i ? "," : "", "\"d", i, R"(":{"anyOf":[{"$ref":"#/$defs/d)", (i + 1) % 60,
                          R"("},{"$ref":"#/$defs/d)", i * 7 % 60, R"("},{"type":"array","items":{"$ref":"#/$defs/d)",
                          i * 3 % 60, R"("}}]})");
  }
  const auto pattern = [](const std::string& text) { return R"({"type":"string","pattern":")" + text + "\"}"; };
  const std::vector<std::string> schemas = {
      repeated(R"({"type":"array","items":)", 20) + "{}" + repeated("}", 20),
      repeated(R"({"type":"array","items":)", 40) + "{}" + repeated("}", 40),
      repeated(R"({"anyOf":[)", 60) + "{}" + repeated("]}", 60),
      R"({"enum":[)" + words + "]}",
      R"({"type":"object","properties":{)" + counted + R"(},"minProperties":100,"maxProperties":200})",
      R"({"type":"object","properties":{)" + counted + "}}",
      R"({"anyOf":[)" + alike + "]}",
      R"({"$defs":{)" + loops + R"(},"$ref":"#/$defs/d0"})",
      R"({"$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/a"}]}},"$ref":"#/$defs/a"})",
      pattern("((a{1,100}){1,100}){1,100}"),
      pattern("(x?){1000}x{1000}"),
      pattern("(a|aa|aaa|aaaa)*(b|bb|bbb)*(a|aa|aaa)*x{500}"),
      pattern("(a|b|ab|ba|aab|bba)*c(a|b)*[ab]{64}"),
      pattern("(.*a){40}"),
      pattern("[\\\\s\\\\S]{4000}"),
      pattern(repeated("(a*)*", 200)),
      pattern(repeated("ab", 2'000)),
      pattern(repeated("word|", 800) + "x"),
      R"({"properties":{")" + std::string(60'000, 'k') + R"(":{"properties":{)" + counted + "}}}}",
      R"({"type":"string","maxLength":1e300})",
      pattern(repeated("(", 1000) + "a" + repeated(")*", 1000)),
      pattern(repeated("(a|", 1000) + "b" + repeated(")", 1000)),
      R"({"type":"string","minLength":3000,"maxLength":4096})",
      R"({"type":"array","items":{"type":"array","items":{"type":"string","maxLength":4000},"maxItems":4000},"minItems":4000})",
      R"({"title":")" + std::string(1 << 20, 'x') + "\"}",
  };
  for (const std::string& schema : schemas) {
    const double start = cpu_seconds();
    const auto grammar = compile(schema);
    if (grammar.ok()) {
      GrammarMatcher matcher(*grammar);
      std::vector<uint32_t> mask;
      for (int step = 0; step < 50 && !matcher.ended() && matcher.fill(mask).ok(); ++step) {
        TokenId id = 0;
        while (!allows(mask, id)) ++id;
        ASSERT_EQ(matcher.accept(id), absl::OkStatus());
      }
    } else {
      EXPECT_LT(grammar.status().message().size(), 700u);
      EXPECT_TRUE(absl::IsInvalidArgument(grammar.status())) << grammar.status();
    }
    EXPECT_LT(cpu_seconds() - start, 20) << schema.substr(0, 200);  // it takes a second or two
  }
  expect_bounded_peak();
}

// Automata of the square of a pattern's length, which the steps hardly count.
TEST_F(GrammarTest, StarsInStarsTakeBoundedMemory) {
  std::string stars;
  for (int i = 0; i < 30; ++i) {
    stars += absl::StrCat(i ? "," : "", "\"s", i, R"(":{"type":"string","pattern":")", repeated("(a*)*", 800), "\"}");
  }
  const auto grammar = compile(R"({"properties":{)" + stars + "}}");
  EXPECT_TRUE(grammar.ok() || absl::IsInvalidArgument(grammar.status())) << grammar.status();
  expect_bounded_peak();
}

TEST_F(GrammarTest, CompilesFromManyThreads) {
  std::vector<std::thread> threads;
  std::atomic<int> good = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5; ++i) {
        const auto grammar = compile(absl::StrCat(R"({"type":"integer","minimum":)", (i + t) % 5, "}"));
        good += grammar.ok() && takes(*grammar, "77");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 20);
}

}  // namespace
}  // namespace parvl
