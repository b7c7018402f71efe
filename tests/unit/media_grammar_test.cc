// Schemas that are understood and that are not, and what their grammars allow.
#include <gmock/gmock.h>

#include <algorithm>
#include <random>

#include "parvl/media/tool_syntax.h"
#include "tests/unit/media_grammar_fixture.h"

namespace parvl {
namespace {

using testing::AllOf;
using testing::HasSubstr;

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
      {R"({"type":"string","format":"date"})",
       {R"("2024-02-29")", R"("2000-02-29")", R"("2023-12-31")"},
       {R"("2024-13-01")", R"("2023-02-29")", R"("1900-02-29")", R"("2024-02-31")", R"("2024-09-31")"}},
      {R"({"type":"string","format":"date-time"})",
       {R"("2024-02-29T23:59:59Z")", R"("2024-04-30T00:00:00.25+01:00")"},
       {R"("2024-04-31T00:00:00Z")", R"("2024-04-30")"}},
      {R"({"type":"string","format":"ipv4"})", {R"("97.10.248.0")"}, {R"("97.010.248.67")", R"("256.1.1.1")"}},
      {R"({"type":"number","minimum":0.1,"maximum":0.1})", {"0.1"}, {"0.2"}},
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

// A model that likes spaces must not print them to the end of its tokens.
TEST_F(GrammarTest, SpaceBetweenTwoPartsHasABound) {
  const std::string space(20, ' ');
  for (const char* schema : {R"({"type":"object","properties":{"a":{"type":"array","items":{"type":"integer"}}},
                                 "required":["a"]})",
                             R"({"type":"object"})", "{}"}) {
    const auto grammar = compile(schema);
    ASSERT_TRUE(grammar.ok()) << schema << ": " << grammar.status();
    const std::vector<std::string> parts = {"{", R"("a")", ":", "[", "1", ",", "2", "]", "}"};
    for (size_t wide = 1; wide < parts.size(); ++wide) {
      std::string fits, over;
      for (size_t i = 0; i < parts.size(); ++i) {
        fits += (i == wide ? space : "") + parts[i];
        over += (i == wide ? space + ' ' : "") + parts[i];
      }
      EXPECT_TRUE(takes(*grammar, fits)) << schema << " should take " << fits;
      EXPECT_FALSE(takes(*grammar, over)) << schema << " should refuse " << over;
    }
    EXPECT_FALSE(takes(*grammar, space + ' ' + R"({"a":[1]})")) << schema;
    EXPECT_FALSE(takes(*grammar, R"({"a":[1]})" + space + ' ')) << schema;
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
      {R"({"type":"integer","exclusiveMinimum":5,"exclusiveMaximum":6})", "holds no whole number"},
      {R"({"type":"integer","minimum":18446744073709551615})", "within ±2^53"},
      {R"({"type":"number","exclusiveMinimum":0,"exclusiveMaximum":1e-300})", "at most six decimals"},
      {R"({"type":"number","exclusiveMinimum":-0.5,"exclusiveMaximum":-0.499999})", "at most six decimals"},
      {R"({"type":"number","minimum":5.7462137,"exclusiveMaximum":5.746213701})", "at most six decimals"},
      {R"({"type":"object","properties":{"a":{"type":"number","minimum":1e-7,"maximum":1e-7}}})", "'#/properties/a'"},
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

TEST_F(GrammarTest, SaysWhereTheCompilerRefusesAPart) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {R"({"type":"object","properties":{"ok":{"type":"string"},"a/b":{"type":"string","pattern":"(?=a)b"}}})",
       "at '#/properties/a~1b': "},
      {R"({"type":"array","items":{"anyOf":[{"type":"null"},{"type":"number","multipleOf":0.1}]}})",
       "at '#/items/anyOf/1': "},
      {R"({"$defs":{"n":{"type":"integer","multipleOf":3,"minimum":0}},"type":"object",
           "properties":{"a":{"$ref":"#/$defs/n"}}})",
       "at '#/$defs/n': "},
      {R"({"type":"object","patternProperties":{"(?=a)b":{"type":"integer"}}})", "at '#': "},
      {R"({"type":"object","properties":{"pattern":{"type":"object","properties":{
           "x":{"oneOf":[{"type":"integer"},{"type":"number"}]}}}}})",
       "at '#/properties/pattern/properties/x': "},
  };
  for (const auto& [schema, place] : cases) {
    const std::string message(compile(schema).status().message());
    EXPECT_TRUE(message.starts_with(place)) << message;
  }
  const auto parameters = [](const char* pattern) {
    return OrderedJson{{"type", "object"}, {"properties", {{"p", {{"type", "string"}, {"pattern", pattern}}}}}};
  };
  ToolSyntax syntax;
  syntax.begin = "<", syntax.trigger = "<", syntax.middle = "|", syntax.end = ">";
  const std::string source =
      tool_grammar(syntax, {{"good", parameters("a")}, {"bad", parameters("a$b")}}, ToolUse::kAuto, false);
  const std::string message(compiler_->compile(source).status().message());
  EXPECT_TRUE(message.starts_with("schema 2 of 2 at '#/properties/p': ")) << message;
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
  const std::string form = *source_of(R"({"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]})");
  const auto either = *compiler_->compile(tool_or_form_grammar(syntax, functions, form, true));
  EXPECT_TRUE(takes(either, f + "\n" + g));
  EXPECT_TRUE(takes(either, R"({"a": 1})"));
  EXPECT_FALSE(takes(either, ""));
  EXPECT_FALSE(takes(either, "so: " + f));
  EXPECT_FALSE(takes(either, R"({"a": "x"})"));
  EXPECT_FALSE(takes(either, R"({"a": 1})" + f));
}

}  // namespace
}  // namespace parvl
