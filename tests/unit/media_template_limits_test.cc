// Chat templates that would run, or grow, without end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include "parvl/base/clock.h"
#include "parvl/media/jinja.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

constexpr char kSteps[] = "the template takes more than the limit of 20000000 steps";
constexpr char kBytes[] = "the template handles more than the limit of 268435456 bytes of text";
constexpr char kNesting[] = "the template goes deeper than the limit of 500 levels";
constexpr char kRange[] = "range() of more than the limit of 1000000 elements";

// What renders, or the error's message.
std::string rendered(const std::string& source) {
  const auto compiled = JinjaTemplate::compile(source);
  if (!compiled.ok()) return "does not compile: " + std::string(compiled.status().message());
  const auto runs = (*compiled)->render(TemplateValue::of_object());
  if (!runs.ok()) {
    EXPECT_EQ(runs.status().code(), absl::StatusCode::kInvalidArgument) << source;
    return std::string(runs.status().message());
  }
  std::string text;
  for (const TextRun& run : *runs) text += run.text;
  return text;
}

struct Endless {
  const char* source;
  const char* error;
};

class TemplateLimitsTest : public testing::TestWithParam<Endless> {};

TEST_P(TemplateLimitsTest, IsAnErrorSoon) {
  const RealClock clock;
  const double start = clock.now_seconds();
  EXPECT_THAT(rendered(GetParam().source), HasSubstr(GetParam().error));
  EXPECT_LT(clock.now_seconds() - start, 20);  // about one, on a machine that does nothing else
}

INSTANTIATE_TEST_SUITE_P(
    Loops, TemplateLimitsTest,
    testing::Values(
        Endless{"{% for i in range(1000000000) %}x{% endfor %}", kRange},
        Endless{"{{ range(-9000000000000000000, 9000000000000000000) }}", kRange},
        Endless{"{{ range(9000000000000000000, -9000000000000000000, -1) }}", kRange},
        Endless{"{% for i in range(1000000) %}x{% endfor %}", kSteps},
        Endless{"{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", kSteps},
        Endless{"{% for i in range(1000) %}{% for j in range(1000) %}{% for k in range(1000) %}{{ k }}{% endfor %}"
                "{% endfor %}{% endfor %}",
                kSteps},
        Endless{"{% set x = [0] %}{% for i in x %}{% for j in range(100) %}{{ i is odd }}{% endfor %}"
                "{% for j in range(900000) if j < 0 %}{% endfor %}{% endfor %}",
                kSteps},
        Endless{"{% set x = [1, 2] %}{% for i in range(60) %}{% set x = x + x %}{% endfor %}{{ x | length }}", kSteps},
        Endless{"{% set ns = namespace(x=[1, 2]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
                kSteps},
        Endless{"{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
                "{{ ns.x | tojson }}",
                kSteps},
        Endless{"{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
                "{{ ns.x }}",
                kSteps},
        Endless{"{% set ns = namespace(x=(1, 2)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
                "{{ ns.x == ns.x }}",
                kSteps}));

INSTANTIATE_TEST_SUITE_P(
    Texts, TemplateLimitsTest,
    testing::Values(
        Endless{"{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
                kBytes},
        Endless{"{% set x = 'a' * 1000 %}{{ x * 1000000000000 }}", kBytes}, Endless{"{{ '' * 1000000000000 }}", kSteps},
        Endless{"{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}", kBytes},
        Endless{"{% set x = 'a' * 1000000 %}{{ x | replace('', x) }}", kBytes},
        Endless{"{% set x = 'a ' * 500000 %}{{ x.split(' ') | length }}", kBytes},
        Endless{"{% set x = 'a\n' * 500000 %}{{ x | indent(100000) }}", kBytes},
        Endless{"{{ 'a' | indent(1000000000000) }}", kBytes},
        Endless{"{% set x = 'a' * 100000 %}{{ range(100000) | join(x) }}", kBytes},
        Endless{"{{ range(1000) | list | tojson(indent=2000000000) }}", kBytes}));

INSTANTIATE_TEST_SUITE_P(Levels, TemplateLimitsTest,
                         testing::Values(Endless{"{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", kNesting},
                                         Endless{"{% set x = [] %}{% set y = x.append(x) %}{{ x | tojson }}", kNesting},
                                         Endless{"{% set x = [] %}{% set y = x.append(x) %}{{ x | string }}", kNesting},
                                         Endless{"{% set x = [] %}{% set y = x.append(x) %}{{ x }}", kNesting}));

TEST(TemplateLimits, ListsInListsAreDestroyedHoweverDeep) {
  EXPECT_EQ(rendered("{% set ns = namespace(x=[]) %}{% for i in range(20000) %}{% set ns.x = [[[[[[[[ns.x]]]]]]]] %}"
                     "{% endfor %}done"),
            "done");
}

// Each way for a list or an object to hold itself, with a megabyte beside it.
TEST(TemplateLimits, WhatHoldsItselfIsFreed) {
  const auto in_use = [] {
    const auto info = ::mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  for (const char* cycle :
       {"{% set x = [big] %}{% set y = x.append(x) %}", "{% set x = [big] %}{% set y = x.append([[x]]) %}",
        "{% set x = [big] %}{% set y = x.append(x.append) %}", "{% set x = namespace(a=big) %}{% set x.b = x %}",
        "{% set x = namespace(a=big) %}{% set x.b = {'c': [x]} %}",
        "{% set x = [big] %}{% set y = [x] %}{% set z = x.append(y) %}{{ (x | tojson) }}",
        "{% set x = namespace(a=big) %}{% macro f() %}{{ caller() }}{% endmacro %}"
        "{% call f() %}{% set x.b = caller %}{% endcall %}"}) {
    const std::string source = std::string("{% set big = 'a' * 1000000 %}") + cycle;
    rendered(source);  // what the first run makes for all of them
    const size_t before = in_use();
    for (int i = 0; i < 10; ++i) rendered(source);
    EXPECT_LT(in_use(), before + 1'000'000) << source;
  }
}

TEST(TemplateLimits, ASourceThatGoesTooDeepDoesNotCompile) {
  for (const char* level : {"(", "[", "not ", "-", "a(", "{'a': ", "1 if 1 else "}) {
    std::string source = "{{ ";
    for (int i = 0; i < 50'000; ++i) source += level;
    EXPECT_THAT(rendered(source + "1"), HasSubstr(kNesting)) << level;
  }
  for (const char* level : {"{% if 1 %}", "{% for i in x %}"}) {
    std::string source;
    for (int i = 0; i < 50'000; ++i) source += level;
    EXPECT_THAT(rendered(source), HasSubstr(kNesting)) << level;
  }
  std::string chain = "{% if 1 %}";
  for (int i = 0; i < 50'000; ++i) chain += "{% elif 1 %}";
  EXPECT_THAT(rendered(chain), HasSubstr(kNesting));
}

TEST(TemplateLimits, OrdinaryWorkIsFarBelowThem) {
  // A thousand turns of a kilobyte each, handled the way that templates do.
  EXPECT_EQ(rendered("{% set ns = namespace(n=0) %}{% for i in range(1000) %}{% set content = ('word ' * 200) | trim %}"
                     "{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
                     "{%- set text = '<|im_start|>' ~ (i % 2) ~ '\n' ~ content ~ '<|im_end|>' %}"
                     "{%- set ns.n = ns.n + text | replace('word', 'w') | length %}{% endfor %}{{ ns.n }}")
                .substr(0, 3),
            "423");
}

TEST(TemplateLimits, EachRunHasItsOwn) {
  const auto compiled = JinjaTemplate::compile("{% for i in range(30000) %}{{ '' }}{% endfor %}");
  ASSERT_TRUE(compiled.ok());
  for (int i = 0; i < 10; ++i) EXPECT_TRUE((*compiled)->render(TemplateValue::of_object()).ok()) << i;
}

}  // namespace
}  // namespace parvl
