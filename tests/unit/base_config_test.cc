#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "parvl/base/config.h"

namespace parvl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string error_of(std::string_view text, const ConfigLimits& limits = {}) {
  const auto result = parse_config(text, "c.yaml", limits);
  return result.ok() ? "" : std::string(result.status().message());
}

TEST(ConfigParse, ValuesKnowTheirLines) {
  const auto root = parse_config("a: 1\nb:\n  - x\n  - {c: 'y'}\n", "c.yaml");
  ASSERT_TRUE(root.ok()) << root.status();
  EXPECT_EQ(root->find("a")->value.place(), "c.yaml:1");
  const ConfigNode& list = root->find("b")->value;
  ASSERT_EQ(list.items.size(), 2u);
  EXPECT_EQ(list.items[0].place(), "c.yaml:3");
  EXPECT_EQ(list.items[1].find("c")->value.place(), "c.yaml:4");
  EXPECT_TRUE(list.items[1].find("c")->value.quoted);
}

TEST(ConfigParse, AnEmptyFileIsAnEmptySection) {
  for (const char* text : {"", "# nothing\n", "---\n", "~"}) {
    const auto root = parse_config(text, "c.yaml");
    ASSERT_TRUE(root.ok()) << root.status();
    EXPECT_EQ(root->kind, ConfigNode::Kind::kMap);
    EXPECT_TRUE(root->entries.empty());
  }
}

TEST(ConfigParse, Refusals) {
  EXPECT_EQ(error_of("a: 1\nb: 2\na: 3\n"),
            "c.yaml:3: the key 'a' is given a second time; it first stands at c.yaml:1; remove one");
  EXPECT_THAT(error_of("a: &x 1\nb: *x\n"), HasSubstr("c.yaml:1: anchors and aliases"));
  EXPECT_THAT(error_of("a: *x\n"), HasSubstr("c.yaml:1"));
  EXPECT_THAT(error_of("a: !!python/object x\n"),
              HasSubstr("the tag 'tag:yaml.org,2002:python/object' is not supported"));
  EXPECT_THAT(error_of("a: 1\n---\nb: 2\n"), HasSubstr("second document"));
  EXPECT_THAT(error_of("[1, 2]: 3\n"), HasSubstr("a list or section stands where a key belongs"));
  EXPECT_THAT(error_of("- 1\n"), HasSubstr("must hold `key: value` lines"));
  EXPECT_THAT(error_of("a: [1,\nb: 2\n"), HasSubstr("not valid YAML"));
  EXPECT_THAT(error_of("a: \"x\n"), HasSubstr("not valid YAML"));
}

TEST(ConfigParse, BillionLaughsIsRefusedAtItsFirstAnchor) {
  std::string text = "a0: &a0 [x, x]\n";
  for (int i = 1; i < 40; ++i) {
    const std::string before = std::to_string(i - 1);
    text += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [*a" + before + ", *a" + before + "]\n";
  }
  EXPECT_THAT(error_of(text), HasSubstr("c.yaml:1: anchors and aliases"));
}

TEST(ConfigParse, LimitsAreReached) {
  EXPECT_EQ(error_of("a: [[[1]]]\n", {.max_depth = 4}), "");
  EXPECT_THAT(error_of("a: [[[[1]]]]\n", {.max_depth = 4}), HasSubstr("deeper than 4 levels"));
  EXPECT_THAT(error_of("a: " + std::string(100'000, '[')), HasSubstr("c.yaml:1: "));
  std::string sections;
  for (int i = 0; i < 100; ++i) sections += std::string(static_cast<size_t>(i), ' ') + "a:\n";
  EXPECT_THAT(error_of(sections), HasSubstr("c.yaml:33: nested deeper than 32 levels"));
  EXPECT_THAT(error_of(std::string(100'000, '{')), HasSubstr("c.yaml:1"));
  EXPECT_EQ(error_of("a: [1, 2]\n", {.max_nodes = 5}), "");
  EXPECT_THAT(error_of("a: [1, 2, 3]\n", {.max_nodes = 5}), HasSubstr("more than 5 values"));
  EXPECT_EQ(error_of("abc: 1\n", {.max_bytes = 7}), "");
  EXPECT_THAT(error_of("abcd: 1\n", {.max_bytes = 7}), HasSubstr("8 bytes of YAML are over the limit of 7"));
}

TEST(ConfigOverride, SetsAndNamesItself) {
  auto root = parse_config("a: {b: 1, c: 2}\nlist: [{x: 1}, {x: 2}]\n", "c.yaml");
  ASSERT_TRUE(root.ok());
  ASSERT_TRUE(apply_override(*root, "a.b=[3, 4]").ok());
  ASSERT_TRUE(apply_override(*root, "list.1.x=9").ok());
  ASSERT_TRUE(apply_override(*root, "new.deep.key=a=b").ok());
  EXPECT_EQ(root->find("a")->value.find("b")->value.items.size(), 2u);
  EXPECT_EQ(root->find("a")->value.find("c")->value.text, "2");
  EXPECT_EQ(root->find("list")->value.items[1].find("x")->value.text, "9");
  EXPECT_EQ(root->find("new")->value.find("deep")->value.find("key")->value.text, "a=b");

  ConfigReader reader(*root);
  ConfigReader a = reader.section("a");
  int64_t b = 0;
  a.integer("b", b, 0);
  a.kind("c");
  EXPECT_EQ(a.finish().message(), "--set 'a.b=[3, 4]': 'a.b' must be a whole number of at least 0, found a list");
  ConfigReader fresh = reader.section("new");
  EXPECT_THAT(std::string(fresh.finish().message()), HasSubstr("--set 'new.deep.key=a=b': unknown key 'new.deep'"));
}

TEST(ConfigOverride, Refusals) {
  auto root = parse_config("a: 1\nlist: [1]\n", "c.yaml");
  ASSERT_TRUE(root.ok());
  const auto message = [&](const std::string& text) { return std::string(apply_override(*root, text).message()); };
  EXPECT_EQ(message("a"), "--set 'a': write it as section.key=value");
  EXPECT_EQ(message("=1"), "--set '=1': write it as section.key=value");
  EXPECT_EQ(message("a..b=1"), "--set 'a..b=1': write it as section.key=value");
  EXPECT_EQ(message("a.b=1"), "--set 'a.b=1': 'a' is a plain value, so it has no key 'b'");
  EXPECT_THAT(message("list.1=1"), HasSubstr("'list' is a list of 1; '1' is not an index into it"));
  EXPECT_THAT(message("list.-1=1"), HasSubstr("not an index"));
  EXPECT_THAT(message("a=[1"), HasSubstr("--set 'a=[1': "));
  EXPECT_THAT(message("a={x: 1, x: 2}"), HasSubstr("second time"));
}

TEST(ConfigReader, ReadsEveryType) {
  const auto root = parse_config(
      "flag: true\nsmall: -3\nbig: 18446744073709551615\nreal: 1.0e-3\nword: 12\nlist: [a, 'b']\nones: [1, 2]\n"
      "reals: [0.5, 1]\npick: two\nempty: ~\nmaps: [{k: 1}, {k: 2}]\nnamed: {x: {k: 3}}\n",
      "c.yaml");
  ASSERT_TRUE(root.ok()) << root.status();
  ConfigReader reader(*root);
  bool flag = false;
  int64_t small = 0, kept = 7;
  uint64_t big = 0;
  double real = 0;
  std::string word, pick;
  std::vector<std::string> list;
  std::vector<int64_t> ones;
  std::vector<double> reals;
  reader.boolean("flag", flag);
  reader.integer("small", small, -5);
  reader.integer("empty", kept, 0);
  reader.integer("absent", kept, 0);
  reader.natural("big", big);
  reader.number("real", real);
  reader.text("word", word);
  reader.choice("pick", pick, {"one", "two"});
  reader.text_list("list", list);
  reader.integer_list("ones", ones, 0);
  reader.number_list("reals", reals);
  auto maps = reader.section_list("maps");
  auto named = reader.named_sections("named");
  EXPECT_TRUE(reader.finish().ok()) << reader.finish();
  EXPECT_TRUE(flag);
  EXPECT_EQ(small, -3);
  EXPECT_EQ(kept, 7);
  EXPECT_EQ(big, UINT64_MAX);
  EXPECT_DOUBLE_EQ(real, 1e-3);
  EXPECT_EQ(word, "12");
  EXPECT_EQ(pick, "two");
  EXPECT_THAT(list, ElementsAre("a", "b"));
  EXPECT_THAT(ones, ElementsAre(1, 2));
  EXPECT_THAT(reals, ElementsAre(0.5, 1.0));
  ASSERT_EQ(maps.size(), 2u);
  int64_t k = 0;
  maps[1].integer("k", k, 0);
  EXPECT_EQ(k, 2);
  ASSERT_EQ(named.size(), 1u);
  EXPECT_EQ(named[0].first, "x");
  named[0].second.integer("k", k, 0, 2);
  EXPECT_EQ(named[0].second.finish().message(), "c.yaml:12: 'named.x.k' must be a whole number from 0 to 2, found '3'");
}

struct WrongValue {
  const char* yaml;
  const char* message;
};

TEST(ConfigReader, WrongTypesAndRanges) {
  const WrongValue cases[] = {
      {"integer: 1.5", "'integer' must be a whole number of at least 1, found '1.5'"},
      {"integer: '3'", "'integer' must be a whole number of at least 1, found the text '3'"},
      {"integer: 0", "'integer' must be a whole number of at least 1, found '0'"},
      {"integer: 99999999999999999999", "whole number of at least 1"},
      {"integer: [1]", "'integer' must be a whole number of at least 1, found a list"},
      {"natural: -1", "'natural' must be a whole number from 0 to 18446744073709551615, found '-1'"},
      {"number: 1", "'number' must be a number in [0, 1), found '1'"},
      {"number: nan", "'number' must be a number in [0, 1), found 'nan'"},
      {"number: x", "found 'x'"},
      {"boolean: yes", "'boolean' must be true or false, found 'yes'"},
      {"choice: float", "'choice' must be one of float32, float64, bfloat16, found 'float'"},
      {"choice: {a: 1}", "'choice' must be one of bfloat16, float32, float64, found a section"},
      {"texts: a", "'texts' must be a list, found 'a'"},
      {"texts: [[a]]", "'texts' must list plain text, found a list"},
      {"section: 3", "'section' must be a section of `key: value`, found '3'"},
      {"sections: [3]", "'sections' must list sections of `key: value`, found '3'"},
      {"tEXTs: []", "unknown key 'tEXTs'; valid here: texts, "},
  };
  for (const WrongValue& c : cases) {
    const auto root = parse_config(c.yaml, "c.yaml");
    ASSERT_TRUE(root.ok()) << c.yaml << ": " << root.status();
    ConfigReader reader(*root);
    int64_t integer = 1;
    uint64_t natural = 0;
    double number = 0;
    bool boolean = false;
    std::string choice;
    std::vector<std::string> texts;
    reader.integer("integer", integer, 1);
    reader.natural("natural", natural);
    reader.number("number", number, {.low = 0, .high = 1, .high_open = true});
    reader.boolean("boolean", boolean);
    reader.choice("choice", choice, {"bfloat16", "float32", "float64"});
    reader.text_list("texts", texts);
    const ConfigReader section = reader.section("section");
    reader.section_list("sections");
    const absl::Status status = reader.finish().ok() ? section.finish() : reader.finish();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.yaml;
    EXPECT_THAT(std::string(status.message()), ::testing::StartsWith("c.yaml:1: ")) << c.yaml;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message)) << c.yaml;
  }
}

TEST(ConfigReader, AnUnknownKeyComesBeforeOtherErrorsAndIsPrintable) {
  const auto root = parse_config("size: x\n\"si\\u0007ze\": 1\n", "c.yaml");
  ASSERT_TRUE(root.ok()) << root.status();
  ConfigReader reader(*root);
  int64_t size = 0;
  reader.integer("size", size, 0);
  EXPECT_EQ(reader.finish().message(), "c.yaml:2: unknown key 'si?ze'; valid here: size");
}

TEST(ConfigReader, AMissingKeyPointsAtItsSection) {
  const auto root = parse_config("a:\n  b:\n    c: 1\n", "c.yaml");
  ASSERT_TRUE(root.ok());
  ConfigReader reader(*root);
  ConfigReader b = reader.section("a").section("b");
  b.kind("c");
  b.require("d", "a number");
  EXPECT_EQ(b.finish().message(), "c.yaml:3: 'a.b.d' is missing; give it a number");
  ConfigReader absent = reader.section("elsewhere");
  absent.require("d", "a number");
  EXPECT_EQ(absent.finish().message(), "c.yaml:1: 'elsewhere.d' is missing; give it a number");
}

TEST(ConfigFile, MissingFileIsNamed) {
  const auto root = load_config("/nonexistent/c.yaml", {});
  EXPECT_EQ(root.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(root.status().message()), HasSubstr("/nonexistent/c.yaml"));
}

}  // namespace
}  // namespace parvl
