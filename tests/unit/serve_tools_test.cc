// What a request says about the form of its answer, and calls of tools in messages and in an answer's text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parvl/serve/api_error.h"
#include "parvl/serve/openai_request.h"
#include "parvl/serve/tool_parser.h"

namespace parvl {
namespace {

using testing::HasSubstr;

RequestRules rules() {
  RequestRules rules;
  rules.vocab_size = 300;
  return rules;
}

Json basic() { return {{"messages", Json::array({{{"role", "user"}, {"content", "hi"}}})}}; }

RequestRules rules_with_tools() {
  RequestRules out = rules();
  out.tools = {"hermes", "<tool_call>", "<tool_call>{\"name\": \"", "\", \"arguments\": ", "}</tool_call>", "\n", true};
  return out;
}

TEST(FormOfAnswerTest, FormsOfTheAnswerBecomeGrammars) {
  const auto grammar_of = [](const std::string& fields) {
    const auto request = parse_request(R"({"messages": [{"role": "user", "content": "hi"}], )" + fields + "}",
                                       Api::kChat, rules_with_tools());
    EXPECT_TRUE(request.ok()) << fields << request.status();
    return request.ok() ? request->grammar : "";
  };
  EXPECT_EQ(grammar_of(R"("response_format": {"type": "text"})"), "");
  EXPECT_EQ(grammar_of(R"("response_format": null, "tools": [])"), "");
  // The order of keys is that of the request.
  EXPECT_THAT(grammar_of(R"("response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema":
                             {"type": "object", "properties": {"z": {}, "a": {}}}}})"),
              HasSubstr(R"("properties":{"z":{},"a":{}})"));
  EXPECT_THAT(grammar_of(R"("response_format": {"type": "json_object"})"), HasSubstr("json_schema"));
  EXPECT_THAT(grammar_of(R"("guided_json": "{\"type\": \"null\"}")"), HasSubstr(R"({"type":"null"})"));
  EXPECT_THAT(grammar_of(R"("structured_outputs": {"regex": "a+", "json": null})"), HasSubstr("a+"));
  const std::string tools = R"("tools": [{"type": "function", "function": {"name": "f", "parameters":
                              {"type": "object", "properties": {"z": {}, "a": {}}}}}, {"type": "function", "function":
                              {"name": "g"}}])";
  EXPECT_THAT(grammar_of(tools), testing::AllOf(HasSubstr("triggered_tags"), HasSubstr(R"({"z":{},"a":{}})"),
                                                HasSubstr(R"("stop_after_first":false)")));
  EXPECT_THAT(grammar_of(tools + R"(, "parallel_tool_calls": false)"), HasSubstr(R"("stop_after_first":true)"));
  EXPECT_THAT(grammar_of(tools + R"(, "tool_choice": "required")"), HasSubstr("tags_with_separator"));
  EXPECT_EQ(grammar_of(tools + R"(, "tool_choice": "none")"), "");
  const std::string named = grammar_of(tools + R"(, "tool_choice": {"type": "function", "function": {"name": "g"}})");
  EXPECT_THAT(named, HasSubstr(R"(\"g\")"));
  EXPECT_THAT(named, testing::Not(HasSubstr(R"(\"f\")")));
}

TEST(FormOfAnswerTest, CallsOfToolsInMessages) {
  Json body = basic();
  body["messages"].push_back(
      {{"role", "assistant"},
       {"content", nullptr},
       {"tool_calls",
        {{{"id", "c1"}, {"type", "function"}, {"function", {{"name", "f"}, {"arguments", R"({"z": 1, "a": 2})"}}}}}}});
  body["messages"].push_back({{"role", "tool"}, {"tool_call_id", "c1"}, {"content", "12"}});
  const auto request = parse_request(body.dump(), Api::kChat, rules_with_tools());
  ASSERT_TRUE(request.ok()) << request.status();
  const Message& call = request->messages[request->messages.size() - 2];
  ASSERT_EQ(call.tool_calls.size(), 1u);
  EXPECT_EQ(call.tool_calls[0].name, "f");
  EXPECT_EQ(call.tool_calls[0].arguments.dump(), R"({"z":1,"a":2})");
  EXPECT_EQ(request->messages.back().tool_call_id, "c1");
  EXPECT_THAT(std::string(parse_request(body.dump(), Api::kChat, rules()).status().message()),
              HasSubstr("knows no tools"));
  for (const char* arguments : {"{", "[1]", "5"}) {
    body["messages"][body["messages"].size() - 2]["tool_calls"][0]["function"]["arguments"] = arguments;
    EXPECT_EQ(http_status_of(parse_request(body.dump(), Api::kChat, rules_with_tools()).status()), 400) << arguments;
  }
}

TEST(ToolParserTest, CutsMakeNoDifference) {
  const ToolSyntax syntax = rules_with_tools().tools;
  const std::string text =
      "so: <tool <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"}{\\\"\", \"b\": [1]}}</tool_call>\n"
      "<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call> \n";
  for (size_t piece = 1; piece <= text.size(); ++piece) {
    ToolParser parser(syntax);
    std::string content;
    std::vector<std::pair<std::string, std::string>> calls;
    const auto take = [&](const std::vector<ToolEvent>& events) {
      for (const ToolEvent& event : events) {
        if (event.kind == ToolEvent::Kind::kText) content += event.text;
        if (event.kind == ToolEvent::Kind::kCall) calls.emplace_back(event.text, "");
        if (event.kind == ToolEvent::Kind::kArguments) calls.back().second += event.text;
      }
    };
    for (size_t at = 0; at < text.size(); at += piece) take(parser.push(std::string_view(text).substr(at, piece)));
    take(parser.finish());
    EXPECT_EQ(content, "so: <tool");
    ASSERT_EQ(calls.size(), 2u);
    EXPECT_EQ(calls[0], std::pair(std::string("f"), std::string(R"({"a": "}{\"", "b": [1]})")));
    EXPECT_EQ(calls[1], std::pair(std::string("g"), std::string("{}")));
  }
  ToolParser cut(syntax);
  EXPECT_TRUE(cut.push("  ").empty());
  EXPECT_TRUE(cut.push("<tool_c").empty());
  const auto rest = cut.finish();
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0].text, "  <tool_c");
}

}  // namespace
}  // namespace parvl
