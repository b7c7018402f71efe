// Limits and messages of chat templates; prompts are compared with transformers' in tests/parity.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "parvl/media/chat_template.h"
#include "parvl/media/prompt.h"
#include "parvl/media/unicode.h"

namespace parvl {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<const Tokenizer> tokenizer() {
  Json vocab = Json::object();
  int id = 0;
  for (char32_t code = 0; code < 0x144; ++code) {
    std::string text, bytes;
    append_utf8(text, code);
    if (bytes_of_spelled(text, bytes)) vocab[text] = id++;
  }
  const Json json = {{"added_tokens", {{{"id", id}, {"content", "<s>"}, {"special", true}, {"normalized", false}}}},
                     {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                     {"decoder", {{"type", "ByteLevel"}}},
                     {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}}};
  auto made = Tokenizer::from_json(json, "test");
  EXPECT_TRUE(made.ok()) << made.status();
  return *made;
}

std::shared_ptr<const ChatTemplate> compiled(const std::string& source, const ChatTemplateLimits& limits = {}) {
  auto made = ChatTemplate::compile(source, Json::object(), *tokenizer(), limits);
  EXPECT_TRUE(made.ok()) << made.status();
  return *made;
}

Message user(const std::string& text) { return {"user", {{ContentPart::Kind::kText, text, -1}}}; }

std::string joined(const absl::StatusOr<std::vector<TextRun>>& runs) {
  EXPECT_TRUE(runs.ok()) << runs.status();
  std::string out;
  for (const TextRun& run : *runs) out += run.text;
  return out;
}

TEST(ChatTemplate, TheOutputLimitIsReached) {
  ChatTemplateLimits limits;
  limits.max_output_bytes = 100;
  const auto chat = compiled("{% for i in range(n) %}0123456789{% endfor %}", limits);
  PromptOptions options;
  options.template_arguments = {{"n", 10}};
  EXPECT_EQ(joined(chat->render({}, options)).size(), 100u);
  options.template_arguments = {{"n", 11}};
  EXPECT_THAT(chat->render({}, options).status().message(), HasSubstr("more than the limit of 100 bytes"));
}

TEST(ChatTemplate, TheSourceLimitIsReached) {
  ChatTemplateLimits limits;
  limits.max_source_bytes = 5;
  EXPECT_TRUE(ChatTemplate::compile("12345", Json::object(), *tokenizer(), limits).ok());
  EXPECT_THAT(ChatTemplate::compile("123456", Json::object(), *tokenizer(), limits).status().message(),
              HasSubstr("over the limit of 5"));
}

TEST(ChatTemplate, RunsSayWhoWroteThem) {
  const auto runs = compiled("<s>{{ messages[0].role }}: {{ messages[0].content }}<s>")->render({user("a<s>b")}, {});
  ASSERT_TRUE(runs.ok()) << runs.status();
  ASSERT_EQ(runs->size(), 3u);
  EXPECT_EQ((*runs)[0].text, "<s>user: ");
  EXPECT_TRUE((*runs)[0].trusted);
  EXPECT_EQ((*runs)[1].text, "a<s>b");
  EXPECT_FALSE((*runs)[1].trusted);
  EXPECT_TRUE((*runs)[2].trusted);
}

TEST(ChatTemplate, AForeignRoleIsNotTrusted) {
  const auto runs = compiled("{{ messages[0].role }}")->render({{"<s>", {}}}, {});
  ASSERT_TRUE(runs.ok());
  ASSERT_EQ(runs->size(), 1u);
  EXPECT_FALSE((*runs)[0].trusted);
}

TEST(ChatTemplate, ErrorsAreOneShortLine) {
  for (const char* source : {"{{ raise_exception(messages[0].content) }}", "{{ messages[0].nothing() }}",
                             "{% for x in 5 %}{% endfor %}", "{{ 'a' + [1] | frob }}"}) {
    const auto status = compiled(source)->render({user(std::string(5000, 'x') + "\n<s>\x01")}, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << source;
    EXPECT_LT(status.message().size(), 600u) << source;
    for (const char c : status.message()) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << source;
  }
  for (const char* source : {"{% if %}", "{{ ", "{% endfor %}", "{% set 1 = 2 %}", "{{ 'a",
                             "{% macro 3() %}{% endmacro %}", "{% for 1 in x %}{% endfor %}", "{{ \\"}) {
    const auto made = ChatTemplate::compile(source, Json::object(), *tokenizer());
    if (made.ok()) {
      EXPECT_FALSE((*made)->render({user("x")}, {}).ok()) << source;
    } else {
      EXPECT_THAT(made.status().message(), HasSubstr("chat template: ")) << source;
    }
  }
}

TEST(ChatTemplate, ManyThreadsRenderAtOnce) {
  const auto chat =
      compiled("{{ strftime_now('%Y') | length }}{% for m in messages %}{{ m.content | trim }}{% endfor %}");
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 300; ++i)
        wrong[t] += joined(chat->render({user("  hi \u3000"), user("<s>")}, {})) != "4hi<s>";
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(wrong, ::testing::ElementsAre(0, 0, 0, 0));
}

TEST(ChatTemplate, AMegabyteOfGuardsAndTokensIsFast) {
  std::string text;
  for (int i = 0; i < 100'000; ++i) text += "\uFDD0<s>\uFDD1";
  const auto runs = compiled("{{ messages[0].content }}{{ messages[0].content | tojson }}")->render({user(text)}, {});
  ASSERT_TRUE(runs.ok());
  const auto tokens = tokenizer()->encode(*runs);
  EXPECT_EQ(tokens.size(), 2 * 300'000u + 2);
  for (const EncodedToken& token : tokens) ASSERT_NE(token.id, 256);
}

}  // namespace
}  // namespace parvl
