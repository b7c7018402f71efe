// What a request says about the form of its answer, and calls of tools in messages and in an answer's text.
#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "parvl/base/ordered_json.h"
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

// As OpenAI has it: an answer is either calls or of the form, unless a call must come.
TEST(FormOfAnswerTest, ToolsBesideAResponseFormat) {
  const std::string form = R"("response_format": {"type": "json_object"}, "tools": [{"type": "function", "function":
      {"name": "f"}}])";
  const auto parsed = [&](const std::string& fields, const RequestRules& rules) {
    return parse_request(R"({"messages": [{"role": "user", "content": "hi"}], )" + fields + "}", Api::kChat, rules);
  };
  const auto either = parsed(form, rules_with_tools());
  ASSERT_TRUE(either.ok()) << either.status();
  EXPECT_TRUE(either->reads_calls);
  const OrderedJson format = OrderedJson::parse(either->grammar)["format"];
  EXPECT_EQ(format["type"], "or");
  EXPECT_EQ(format["elements"][0]["type"], "tags_with_separator");
  EXPECT_EQ(format["elements"][1]["type"], "json_schema");
  const auto required = parsed(form + R"(, "tool_choice": "required")", rules_with_tools());
  ASSERT_TRUE(required.ok()) << required.status();
  EXPECT_EQ(OrderedJson::parse(required->grammar)["format"]["type"], "tags_with_separator");
  const auto none = parsed(form + R"(, "tool_choice": "none")", rules_with_tools());
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_FALSE(none->reads_calls);
  EXPECT_EQ(OrderedJson::parse(none->grammar)["format"]["type"], "json_schema");
  RequestRules llama = rules_with_tools();
  llama.tools = {"llama3_json", "{\"name\": \"", "{\"name\": \"", "\", \"parameters\": ", "}", "", false};
  EXPECT_THAT(std::string(parsed(form, llama).status().message()), HasSubstr("could not be told from an answer"));
  EXPECT_TRUE(parsed(form + R"(, "tool_choice": "required")", llama).ok());
  EXPECT_EQ(http_status_of(parsed(R"("guided_json": {}, "tools": [{"type": "function", "function": {"name": "f"}}])",
                                  rules_with_tools())
                               .status()),
            400);
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

TEST(FormOfAnswerTest, WhatCannotBeKeptToOrCostsTooMuchIsRefusedAtOnce) {
  const auto fields_of = [](size_t keys) {
    std::string out = "{";
    for (size_t i = 0; i < keys; ++i) out += absl::StrCat(i ? "," : "", "\"k", i, "\":0");
    return out + "}";
  };
  const auto status_of = [](const std::string& fields) {
    return parse_request(R"({"messages": [{"role": "user", "content": "hi"}], )" + fields + "}", Api::kChat,
                         rules_with_tools())
        .status();
  };
  const auto tool = [](const std::string& parameters) {
    return R"("tools": [{"type": "function", "function": {"name": "f", "parameters": )" + parameters + "}}]";
  };
  const std::string many = fields_of(kMaxOrderedKeys + 1), text(1000, 'x');
  std::string choices;
  for (int i = 0; i < 200; ++i) choices += absl::StrCat(i ? "," : "", "\"", i, text, "\"");
  const std::vector<std::pair<std::string, const char*>> wrong = {
      {R"("structured_outputs": {"json_object": "yes"})", "structured_outputs.json_object must be true or false"},
      {R"("structured_outputs": {"regex": "a{5000}"})", "structured_outputs.regex repeats something more than 4096"},
      {R"("structured_outputs": {"regex": ")" + std::string(200'000, 'a') + "\"}", "200000 bytes are over the limit"},
      {R"("structured_outputs": {"choice": [)" + choices + "]}", "structured_outputs.choice: "},
      {R"("guided_json": {"type": "string", "maxLength": 1e300})", "'maxLength' must be a whole number from 0 to 4096"},
      {R"("guided_json": {"properties": )" + many + "}", "an object has more than 1024 keys"},
      {R"("guided_json": "{\"type\": \"integer\"}", "response_format": {"type": "text", "x": )" + many + "}",
       "an object has more than 1024 keys"},
      {tool(R"({"$ref": "#/$defs/a", "$defs": {"a": {"const": "abc"}}})"),
       "its $ref must lead to a schema of the type"},
      {tool(R"({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "string"}}})"),
       "tools[0].function.parameters: its $ref must lead to"},
      {tool(R"({"$ref": "#"})"), "its $ref must lead to"},
      {R"("messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": )" +
           absl::StrReplaceAll(many, {{"\"", "\\\""}}) + "}\"}}]}]",
       "an object has more than 1024 keys"},
      {R"("messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": \")" +
           std::string(5'000'000, 'x') + "\\\"}\"}}]}]",
       "over the limit of 4194304"},
  };
  for (const auto& [fields, message] : wrong) {
    const absl::Status status = status_of(fields);
    EXPECT_EQ(http_status_of(status), 400) << fields.substr(0, 200);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message)) << fields.substr(0, 200);
    EXPECT_LT(status.message().size(), 700u);
  }
  EXPECT_EQ(status_of(R"("structured_outputs": {"json_object": false, "regex": "a{4096}"})"), absl::OkStatus());
  EXPECT_EQ(status_of(tool(R"({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {}}}}})")), absl::OkStatus());
  // What is not read in its order may have as many keys as it likes.
  EXPECT_EQ(
      status_of(R"("metadata": )" + many + R"(, "guided_json": {"properties": )" + fields_of(kMaxOrderedKeys) + "}")
          .message(),
      status_of(R"("guided_json": {"properties": )" + fields_of(kMaxOrderedKeys) + "}").message());
  EXPECT_EQ(status_of(R"("metadata": )" + many + R"(, "guided_json": {"type": "null"})"), absl::OkStatus());
}

TEST(ToolParserTest, BrokenArgumentsHarmNoOtherCall) {
  ToolParser parser(rules_with_tools().tools);
  std::string arguments;
  for (const ToolEvent& event : parser.push("<tool_call>{\"name\": \"f\", \"arguments\": \"}</tool_call>"
                                            "<tool_call>{\"name\": \"g\", \"arguments\": {\"a\": {}}}</tool_call>")) {
    if (event.kind == ToolEvent::Kind::kCall) arguments.clear();
    if (event.kind == ToolEvent::Kind::kArguments) arguments += event.text;
  }
  EXPECT_EQ(arguments, "{\"a\": {}}");
}

TEST(FormOfAnswerTest, WhatIsAcceptedHasAnEffect) {
  const auto refusal = [](const Json& more, const char* role) {
    Json body = basic();
    body["messages"].push_back({{"role", role}, {"content", "x"}});
    body["messages"].back().update(more);
    return parse_request(body.dump(), Api::kChat, rules_with_tools()).status();
  };
  EXPECT_TRUE(refusal({{"tool_calls", Json::array()}}, "assistant").ok());
  for (const Json& calls : {Json::object(), Json(""), Json(0)}) {
    EXPECT_THAT(std::string(refusal({{"tool_calls", calls}}, "assistant").message()),
                HasSubstr("tool_calls must be a list of calls"));
  }
  Json body = basic();
  body["structured_outputs"] = {{"regex", "a"}, {"choice", {"b"}}};
  EXPECT_EQ(parse_request(body.dump(), Api::kChat, rules_with_tools()).status().message(),
            "'structured_outputs' holds several forms of the answer; leave all but one out");
  body = basic();
  body["tools"] = {{{"type", "function"}, {"function", {{"name", "f"}}}}};
  body["tool_choice"] = {{"type", "custom"}, {"function", {{"name", "f"}}}};
  const absl::Status status = parse_request(body.dump(), Api::kChat, rules_with_tools()).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("'tool_choice' must be none, auto, required or"));
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

TEST(ToolParserTest, KnowsWhetherACallWasCut) {
  const std::string call = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1]}}</tool_call>";
  for (size_t length = 0; length <= call.size(); ++length) {
    ToolParser parser(rules_with_tools().tools);
    parser.push("so: " + call + "\n" + call.substr(0, length));
    parser.finish();
    const bool begun = length >= std::string("<tool_call>{\"name\": \"").size();
    EXPECT_EQ(parser.inside_call(), begun && length < call.size()) << call.substr(0, length);
  }
}

// A million bytes, one by one: looking at all of them again for each would take minutes.
TEST(ToolParserTest, WhiteSpaceIsLookedAtOnce) {
  ToolParser parser(rules_with_tools().tools);
  const std::string piece(1 << 10, ' ');
  for (int i = 0; i < 1 << 10; ++i) ASSERT_TRUE(parser.push(piece).empty());
  const std::vector<ToolEvent> word = parser.push("x \n");
  ASSERT_EQ(word.size(), 1u);
  EXPECT_EQ(word[0].text.size(), (1u << 20) + 1);
  EXPECT_TRUE(parser.push(" <tool_call>").empty());  // the space before it is no content
  EXPECT_TRUE(parser.push("{\"name\": \"").empty());
  EXPECT_TRUE(parser.inside_call());
}

}  // namespace
}  // namespace parvl
