// Schemas that are understood and that are not, what their grammars allow, and what the compiler keeps.
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "parvl/base/memory.h"
#include "parvl/media/grammar.h"
#include "parvl/media/json_schema.h"
#include "parvl/media/tool_syntax.h"
#include "tests/unit/serve_fake.h"

namespace parvl {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr TokenId kEnd = 257;  // of write_model_folder's tokenizer, whose other tokens are bytes

class GrammarTest : public testing::Test {
 protected:
  GrammarTest() {
    write_model_folder(folder_.path());
    tokenizer_ = *Tokenizer::load(folder_.path());
    compiler_ = make_compiler();
  }
  std::unique_ptr<GrammarCompiler> make_compiler(const GrammarLimits& limits = {}) const {
    return std::make_unique<GrammarCompiler>(*tokenizer_, std::vector<TokenId>{kEnd}, limits);
  }
  static absl::StatusOr<std::string> source_of(const std::string& schema) {
    PARVL_ASSIGN_OR_RETURN(const OrderedJson parsed, parse_ordered_json(schema, "the test's schema"));
    PARVL_ASSIGN_OR_RETURN(const OrderedJson supported, supported_schema(parsed, "schema"));
    return grammar_source(json_format(supported));
  }
  absl::StatusOr<std::shared_ptr<const Grammar>> compile(const std::string& schema) {
    PARVL_ASSIGN_OR_RETURN(const std::string source, source_of(schema));
    return compiler_->compile(source);
  }
  static bool allows(const std::vector<uint32_t>& mask, TokenId id) {
    const auto word = static_cast<size_t>(id) / 32;
    return word < mask.size() && (mask[word] >> (id % 32) & 1) != 0;
  }
  // Whether the grammar takes `text`, byte by byte, and then an end.
  static bool takes(const std::shared_ptr<const Grammar>& grammar, std::string_view text) {
    GrammarMatcher matcher(grammar);
    std::vector<uint32_t> mask;
    for (const char c : text) {
      EXPECT_FALSE(matcher.ended());
      EXPECT_EQ(matcher.fill(mask), absl::OkStatus());
      if (!allows(mask, static_cast<unsigned char>(c))) return false;
      EXPECT_EQ(matcher.accept(static_cast<unsigned char>(c)), absl::OkStatus());
    }
    EXPECT_EQ(matcher.fill(mask), absl::OkStatus());
    if (!allows(mask, kEnd)) return false;
    EXPECT_EQ(matcher.accept(kEnd), absl::OkStatus());
    EXPECT_TRUE(matcher.ended());
    return true;
  }

  TemporaryFolder folder_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::unique_ptr<GrammarCompiler> compiler_;
};

struct SchemaCase {
  const char* schema;
  std::vector<const char*> taken, refused;
};

TEST_F(GrammarTest, TakesWhatTheSchemaAllows) {
  const std::vector<SchemaCase> cases = {
      {R"({"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}},"required":["b"]})",
       {R"({"b":1})", R"({"b": -12, "a": "x\n"})", "{\n  \"b\": 0\n}"},
       {"{}", R"({"a":"x","b":1})", R"({"b":1.5})", R"({"b":1,"c":2})", R"({"b":01})", R"({"b":1)"}},
      {R"({"type":"object"})", {"{}", R"({"x":[1,{"y":null}]})"}, {"[]", "1", R"({"x":})"}},
      {R"({"type":"array"})", {"[]", R"([1,"a"])"}, {"{}"}},
      {R"({"type":"string","minLength":2,"maxLength":3})",
       {R"("ab")", R"("éàü")"},
       {R"("a")", R"("abcd")", "\"a\tb\""}},
      {R"({"type":["string","null"]})", {"null", R"("x")"}, {"1"}},
      {R"({"type":"integer","minimum":-3,"exclusiveMaximum":12})", {"-3", "0", "11"}, {"-4", "12", "3.0"}},
      {R"({"type":"integer","multipleOf":7})", {"0", "14", "-21"}, {"15"}},
      {R"({"enum":["a/b",1,null,{"k":[true]}]})", {"1", "null"}, {"2", R"("a")"}},
      {R"({"type":"string","enum":["red","green"]})", {R"("red")"}, {R"("blue")", R"("re")"}},
      {R"({"const":"x"})", {R"("x")"}, {R"("y")"}},
      {R"({"type":"string","pattern":"^[a-c]{2}$"})", {R"("ab")"}, {R"("abc")", R"("xy")"}},
      {R"({"type":"string","format":"date"})", {R"("2024-02-29")"}, {R"("2024-13-01")"}},
      {R"({"type":"array","items":{"type":"boolean"},"minItems":1,"maxItems":2})",
       {"[true]", "[true,false]"},
       {"[]", "[true,true,true]"}},
      {R"({"type":"array","prefixItems":[{"type":"integer"},{"type":"string"}],"items":false,"minItems":2})",
       {R"([1,"a"])"},
       {"[1]", R"([1,"a",2])"}},
      {R"({"anyOf":[{"type":"integer"},{"type":"null"}]})", {"5", "null"}, {"true"}},
      {R"({"oneOf":[{"type":"integer"},{"type":"string"}]})", {"5", R"("a")"}, {"null"}},
      {R"({"allOf":[{"type":"integer"}]})", {"5"}, {"null"}},
      {R"({"$defs":{"n":{"type":"object","properties":{"n":{"anyOf":[{"$ref":"#/$defs/n"},{"type":"null"}]}},
          "required":["n"]}},"$ref":"#/$defs/n"})",
       {R"({"n":null})", R"({"n":{"n":null}})"},
       {"{}", R"({"n":1})"}},
      {R"({"type":"object","properties":{"a":{"type":"integer"}},"additionalProperties":{"type":"boolean"}})",
       {R"({"a":1,"b":true})", R"({"b":true})", R"({"ab":false})"},
       {R"({"b":1})", R"({"a":true})", R"({"\u0061":true})"}},
      {R"({"properties":{"a":true}})", {R"({"a":[]})"}, {"[]"}},
      {"{}", {"1", "[]", R"({"a":1})"}, {"x"}},
  };
  for (const SchemaCase& c : cases) {
    const auto grammar = compile(c.schema);
    ASSERT_TRUE(grammar.ok()) << c.schema << ": " << grammar.status();
    for (const char* text : c.taken) EXPECT_TRUE(takes(*grammar, text)) << c.schema << " should take " << text;
    for (const char* text : c.refused) EXPECT_FALSE(takes(*grammar, text)) << c.schema << " should refuse " << text;
  }
}

TEST_F(GrammarTest, RefusesByNameWhatItWouldNotKeepTo) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {R"({"not":{"type":"string"}})", "the keyword 'not' is not supported; remove it"},
      {R"({"type":"object","properties":{"a":{"if":{}}}})", "at '#/properties/a': the keyword 'if'"},
      {R"({"type":"array","uniqueItems":true})", "'uniqueItems'"},
      {R"({"type":"array","contains":{"type":"integer"}})", "'contains'"},
      {R"({"type":"string","pattern":"a","minLength":2})", "only one can be kept to"},
      {R"({"type":"string","format":"colour"})", "the format 'colour'"},
      {R"({"type":"string","pattern":"(?=a)b"})", "Lookahead"},
      {R"({"type":"string","pattern":"a$b"})", "Anchor"},
      {R"({"type":"string","pattern":"[^é]*"})", "pattern"},
      {R"({"type":"number","multipleOf":0.1})", "multipleOf"},
      {R"({"type":"integer","multipleOf":3,"minimum":0})", "multipleOf"},
      {R"({"minLength":2})", "'minLength' needs a 'type'"},
      {R"({"type":"strin"})", "'type' must be"},
      {R"({"type":"string","enum":["a",1]})", "'enum' holds a value (number)"},
      {R"({"enum":[]})", "'enum' must be"},
      {R"({"anyOf":[]})", "'anyOf' must be"},
      {R"({"anyOf":[{"type":"string"}],"type":"string"})", "beside"},
      {R"({"allOf":[{"type":"string"},{"minLength":2,"type":"string"}]})", "'allOf'"},
      {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", "oneOf"},
      {R"({"$ref":"#/$defs/x"})", "names no schema"},
      {R"({"$ref":"other.json"})", "'$ref' must be"},
      {R"({"$ref":"#/title","title":"x"})", "names no schema"},
      {R"({"$ref":"#"})", "$ref"},
      {R"({"type":"object","properties":{},"required":["x"]})", "'required' names 'x'"},
      {R"({"type":"object","properties":{"a":{}},"patternProperties":{"b":{}}})", "'patternProperties'"},
      {R"({"type":"object","additionalProperties":{},"minProperties":2})", "'minProperties'"},
      {R"({"type":"string","maxLength":100000})", "'maxLength' must be a whole number from 0 to"},
      {R"({"type":"string","maxLength":-1})", "'maxLength' must be"},
      {R"({"type":"string","pattern":"a{99999}"})", "repeats"},
      {R"({"type":"string","minLength":3,"maxLength":2})", "minLength"},
      {R"({"type":"integer","minimum":5,"maximum":2})", "range"},
      {"false", "false allows no value"},
      {"[]", "must be an object"},
  };
  for (const auto& [schema, message] : cases) {
    const auto grammar = compile(schema);
    ASSERT_FALSE(grammar.ok()) << schema;
    EXPECT_TRUE(absl::IsInvalidArgument(grammar.status())) << schema;
    EXPECT_THAT(std::string(grammar.status().message()), HasSubstr(message)) << schema;
  }
}

// With random choices among what is allowed, every text that ends is JSON, whatever the schema.
TEST_F(GrammarTest, RandomTextsAreJson) {
  std::mt19937_64 random(7);
  for (const char* schema : {"{}", R"({"type":"string","minLength":1,"maxLength":20})",
                             R"({"type":"string","pattern":"\\S{1,8}"})", R"({"type":"string","format":"email"})",
                             R"({"type":"object","properties":{"a\"b":{},"é":{"type":"number"}}})"}) {
    const auto grammar = compile(schema);
    ASSERT_TRUE(grammar.ok()) << schema << grammar.status();
    int ended = 0;
    for (int run = 0; run < 60; ++run) {
      GrammarMatcher matcher(*grammar);
      std::string text;
      std::vector<uint32_t> mask;
      for (int step = 0; step < 400 && !matcher.ended(); ++step) {
        ASSERT_EQ(matcher.fill(mask), absl::OkStatus());
        std::vector<TokenId> allowed;
        for (TokenId id = 0; id < tokenizer_->vocab_size(); ++id) {
          if (allows(mask, id)) allowed.push_back(id);
        }
        TokenId id = allowed[random() % allowed.size()];
        for (const TokenId closing : {TokenId{kEnd}, TokenId{'"'}, TokenId{'}'}, TokenId{']'}}) {
          if (allows(mask, closing) && random() % 4 == 0) id = closing;
        }
        ASSERT_EQ(matcher.accept(id), absl::OkStatus());
        if (id != kEnd) text += tokenizer_->token_bytes(id);
      }
      if (!matcher.ended()) continue;
      ++ended;
      Utf8Stream readable;
      const std::string shown = readable.push(text);
      EXPECT_TRUE(parse_json(shown + readable.flush(), "text", {.max_depth = 1000}).ok()) << schema << "\n" << text;
    }
    EXPECT_GT(ended, 10) << schema;
  }
}

// The same tokens lead to the same place, in a matcher that is built anew.
TEST_F(GrammarTest, PlaceDependsOnTheTokensAlone) {
  const std::string schema = R"({"type":"object","properties":{"a":{"type":"array","items":{"type":"integer"}}}})";
  const auto grammar = compile(schema);
  const auto elsewhere = make_compiler()->compile((*grammar)->source());
  ASSERT_TRUE(elsewhere.ok());
  GrammarMatcher first(*grammar);
  std::vector<uint32_t> mask, other;
  std::vector<TokenId> past;
  for (const char c : std::string_view(R"({"a": [1, 23]})")) {
    ASSERT_EQ(first.fill(mask), absl::OkStatus());
    GrammarMatcher second(*elsewhere);
    for (const TokenId id : past) ASSERT_EQ(second.accept(id), absl::OkStatus());
    ASSERT_EQ(second.fill(other), absl::OkStatus());
    EXPECT_EQ(mask, other);
    past.push_back(static_cast<unsigned char>(c));
    ASSERT_EQ(first.accept(past.back()), absl::OkStatus());
  }
  EXPECT_FALSE(first.accept('x').ok());
}

TEST_F(GrammarTest, NeverAllowsSpecialTokensInAText) {
  GrammarMatcher matcher(*compile(R"({"type":"string"})"));
  ASSERT_EQ(matcher.accept('"'), absl::OkStatus());
  std::vector<uint32_t> mask;
  ASSERT_EQ(matcher.fill(mask), absl::OkStatus());
  EXPECT_TRUE(allows(mask, 'a'));
  for (TokenId id = 256; id <= 260; ++id) EXPECT_FALSE(allows(mask, id)) << id;
}

TEST_F(GrammarTest, KeepsWhatFitsAndForgetsTheOldest) {
  const auto one = compiler_->compile(*source_of(R"({"type":"integer"})"));
  ASSERT_TRUE(one.ok());
  GrammarLimits limits;
  limits.cache_bytes = (*one)->bytes() * 5 / 2;
  const auto compiler = make_compiler(limits);
  const auto source = [](int n) { return *source_of(absl::StrCat(R"({"title":")", n, R"(","type":"integer"})")); };
  for (int n = 0; n < 3; ++n) ASSERT_TRUE(compiler->compile(source(n)).ok());
  EXPECT_EQ(compiler->find(source(0)), nullptr);
  EXPECT_NE(compiler->find(source(2)), nullptr);
  const auto kept = compiler->find(source(1));
  ASSERT_NE(kept, nullptr);
  EXPECT_EQ(*compiler->compile(source(1)), kept);
  ASSERT_TRUE(compiler->compile(source(3)).ok());
  EXPECT_NE(compiler->find(source(1)), nullptr);  // used after 2
  EXPECT_EQ(compiler->find(source(2)), nullptr);
  EXPECT_LE(compiler->cached_bytes(), limits.cache_bytes);
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

std::string repeated(const std::string& text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
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
      pattern(repeated("(", 2000) + "a" + repeated(")*", 2000)),
      pattern(repeated("(a|", 2000) + "b" + repeated(")", 2000)),
      R"({"type":"string","minLength":3000,"maxLength":4096})",
      R"({"type":"array","items":{"type":"array","items":{"type":"string","maxLength":4000},"maxItems":4000},"minItems":4000})",
      R"({"title":")" + std::string(1 << 20, 'x') + "\"}",
  };
  const int64_t free_before = available_bytes();
  for (const std::string& schema : schemas) {
    const auto start = std::chrono::steady_clock::now();
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
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_LT(seconds, 20) << schema.substr(0, 200);  // a second or two alone on a machine
  }
  EXPECT_GT(available_bytes(), free_before - (int64_t{1} << 30));
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

TEST_F(GrammarTest, ToolCallsBeginAtTheTriggerAndAreWhole) {
  ToolSyntax syntax{"hermes", "<tool_call>", "<tool_call>\n{\"name\": \"", "\", \"arguments\": ", "}\n</tool_call>",
                    "\n",     true};
  const OrderedJson parameters = OrderedJson::parse(
      R"({"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],"additionalProperties":false})");
  const std::vector<ToolFunction> functions = {{"f", parameters}, {"g", parameters}};
  const std::string f = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>";
  const std::string g = "<tool_call>\n{\"name\": \"g\", \"arguments\": {\"n\":2}}\n</tool_call>";
  const auto automatic = *compiler_->compile(tool_grammar(syntax, functions, ToolUse::kAuto, true));
  EXPECT_TRUE(takes(automatic, "no call at all {\"name\": 5}"));
  EXPECT_TRUE(takes(automatic, "so: " + f + "\n" + g));
  EXPECT_FALSE(takes(automatic, "<tool_call>\n{\"name\": \"h\", \"arguments\": {}}\n</tool_call>"));
  EXPECT_FALSE(takes(automatic, "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>"));
  EXPECT_FALSE(takes(automatic, "<tool_call>"));
  const auto required = *compiler_->compile(tool_grammar(syntax, functions, ToolUse::kRequired, true));
  EXPECT_TRUE(takes(required, f));
  EXPECT_TRUE(takes(required, f + "\n" + g));
  EXPECT_FALSE(takes(required, ""));
  EXPECT_FALSE(takes(required, "x" + f));
  const auto one = *compiler_->compile(tool_grammar(syntax, functions, ToolUse::kRequired, false));
  EXPECT_TRUE(takes(one, g));
  EXPECT_FALSE(takes(one, f + "\n" + g));
}

}  // namespace
}  // namespace parvl
