#include "parvl/media/tool_syntax.h"

#include <utility>

#include "parvl/media/chat_template.h"
#include "parvl/media/grammar.h"
#include "parvl/media/prompt.h"

namespace parvl {
namespace {

constexpr char kName[] = "probe_function", kArguments[] = R"({"probe_key": "probe_value"})";
constexpr char kHermesTag[] = "<tool_call>", kHermesEnd[] = "</tool_call>";
constexpr char kLlamaBegin[] = R"({"name": ")", kLlamaMiddle[] = R"(", "parameters": )";

// What the template writes for `calls` calls of the same function; "" when it refuses.
std::string render_calls(const ChatTemplate& chat, int calls) {
  const ToolCall call{"call00001", kName, OrderedJson::parse(kArguments)};
  const Message user{"user", {{ContentPart::Kind::kText, "probe question", -1}}};
  Message assistant{"assistant", {}};
  assistant.tool_calls.assign(static_cast<size_t>(calls), call);
  PromptOptions options;
  options.add_generation_prompt = false;
  options.tools = OrderedJson::parse(
      R"([{"type": "function", "function": {"name": "listed_function", "description": "a listed one",
           "parameters": {"type": "object", "properties": {}}}}])");
  const auto runs = chat.render({user, assistant}, options);
  std::string text;
  if (!runs.ok()) return text;
  for (const TextRun& run : *runs) text += run.text;
  // One that leaves the tools out could not be told what to call.
  return text.find("listed_function") == std::string::npos ? "" : text;
}

}  // namespace

ToolSyntax find_tool_syntax(const ChatTemplate& chat) {
  const std::string one = render_calls(chat, 1);
  const size_t name = one.rfind(kName);
  const size_t arguments = name == std::string::npos ? name : one.find(kArguments, name);
  if (arguments == std::string::npos) return {};
  const size_t after_name = name + sizeof(kName) - 1, after = arguments + sizeof(kArguments) - 1;
  ToolSyntax out;
  out.middle = one.substr(after_name, arguments - after_name);
  const size_t tag = one.rfind(kHermesTag, name), end = one.find(kHermesEnd, after);
  const size_t llama = sizeof(kLlamaBegin) - 1;
  if (tag != std::string::npos && end != std::string::npos) {
    out.family = "hermes";
    out.trigger = kHermesTag;
    out.begin = one.substr(tag, name - tag);
    out.end = one.substr(after, end + sizeof(kHermesEnd) - 1 - after);
  } else if (name >= llama && one.compare(name - llama, llama, kLlamaBegin) == 0 && out.middle == kLlamaMiddle &&
             one.compare(after, 1, "}") == 0) {
    out.family = "llama3_json";
    out.trigger = out.begin = kLlamaBegin;
    out.end = "}";
  } else {
    return {};
  }
  const std::string call = out.begin + kName + out.middle + kArguments + out.end;
  const std::string two = render_calls(chat, 2);
  const size_t first = two.find(call), second = first == std::string::npos ? first : two.find(call, first + 1);
  if (second == std::string::npos) return out;
  out.parallel = true;
  out.separator = two.substr(first + call.size(), second - first - call.size());
  return out;
}

namespace {

OrderedJson tool_format(const ToolSyntax& syntax, const std::vector<ToolFunction>& functions, ToolUse use,
                        bool several) {
  OrderedJson tags = OrderedJson::array();
  for (const ToolFunction& function : functions) {
    tags.push_back({{"type", "tag"},
                    {"begin", syntax.begin + function.name + syntax.middle},
                    {"content", json_format(function.parameters)},
                    {"end", syntax.end}});
  }
  OrderedJson format;
  if (use == ToolUse::kAuto) {
    format = {{"type", "triggered_tags"}, {"triggers", OrderedJson::array({syntax.trigger})}, {"tags", tags}};
  } else {
    format = {{"type", "tags_with_separator"}, {"tags", tags}, {"separator", syntax.separator}, {"at_least_one", true}};
  }
  format["stop_after_first"] = !several;
  return format;
}

}  // namespace

std::string tool_grammar(const ToolSyntax& syntax, const std::vector<ToolFunction>& functions, ToolUse use,
                         bool several) {
  return grammar_source(tool_format(syntax, functions, use, several));
}

std::string tool_or_form_grammar(const ToolSyntax& syntax, const std::vector<ToolFunction>& functions,
                                 const std::string& form, bool several) {
  const OrderedJson either = OrderedJson::array(
      {tool_format(syntax, functions, ToolUse::kRequired, several), OrderedJson::parse(form)["format"]});
  return grammar_source({{"type", "or"}, {"elements", either}});
}

}  // namespace parvl
