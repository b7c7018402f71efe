#include "parvl/serve/openai_tools.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "parvl/base/text.h"
#include "parvl/media/grammar.h"
#include "parvl/media/json_schema.h"
#include "parvl/serve/openai_fields.h"

namespace parvl {
namespace {

constexpr size_t kMaxTools = 128, kMaxNameBytes = 64, kMaxChoices = 1000;
constexpr size_t kMaxArgumentBytes = 4u << 20;  // of the calls in a request's messages

absl::Status wrong(const std::string& field, const std::string& message) { return api_error(400, message, "", field); }

const OrderedJson* find_ordered(const OrderedJson& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

absl::Status constrain(const OrderedJson& format, const std::string& field, GenerateRequest& request) {
  if (!request.grammar.empty() && request.grammar_field == field) {
    return wrong(field, absl::StrCat("'", field, "' holds several forms of the answer; leave all but one out"));
  }
  if (!request.grammar.empty()) {
    return wrong(field, absl::StrCat("'", field, "' and '", request.grammar_field,
                                     "' both say what the answer must look like; leave one of them out"));
  }
  request.grammar = grammar_source(format);
  request.grammar_field = field;
  return absl::OkStatus();
}

absl::Status constrain_to_schema(const OrderedJson& schema, const std::string& where, const std::string& field,
                                 GenerateRequest& request) {
  const absl::StatusOr<OrderedJson> supported = supported_schema(schema, where);
  if (!supported.ok()) return with_field(supported.status(), field);
  return constrain(json_format(*supported), field, request);
}

// {"type": "text" | "json_object" | "json_schema", "json_schema": {"name", "schema", "strict"}}
absl::Status read_response_format(const OrderedJson& format, GenerateRequest& request) {
  constexpr char kField[] = "response_format";
  const OrderedJson* type = format.is_object() ? find_ordered(format, "type") : nullptr;
  if (type == nullptr || !type->is_string()) {
    return wrong(kField, "'response_format' must be an object with a string `type`: text, json_object or json_schema");
  }
  if (*type == "text") return absl::OkStatus();
  if (*type == "json_object") return constrain(json_format(any_json_object()), kField, request);
  if (*type != "json_schema") {
    return wrong(kField, absl::StrCat("'response_format' has the type ", excerpt(type->get<std::string>()),
                                      "; text, json_object and json_schema are known"));
  }
  const OrderedJson* holder = find_ordered(format, "json_schema");
  const OrderedJson* schema = holder != nullptr && holder->is_object() ? find_ordered(*holder, "schema") : nullptr;
  if (schema == nullptr) {
    return wrong(kField, "'response_format.json_schema.schema' is missing; put the JSON schema of the answer there");
  }
  return constrain_to_schema(*schema, "response_format.json_schema.schema", kField, request);
}

// A schema as it is, or as a text.
absl::Status read_plain_schema(const OrderedJson& value, const std::string& where, const std::string& field,
                               GenerateRequest& request) {
  if (!value.is_string()) return constrain_to_schema(value, where, field, request);
  const auto schema = parse_ordered_json(value.get_ref<const std::string&>(), where);
  if (!schema.ok()) return with_field(schema.status(), field);
  return constrain_to_schema(*schema, where, field, request);
}

absl::StatusOr<OrderedJson> read_choices(const OrderedJson& texts, const std::string& where, const std::string& field) {
  if (!texts.is_array() || texts.empty() || texts.size() > kMaxChoices) {
    return wrong(field, absl::StrCat(where, " must be a list of 1 to ", kMaxChoices, " texts"));
  }
  OrderedJson choices = OrderedJson::array();
  size_t bytes = 0;
  for (const OrderedJson& text : texts) {
    if (!text.is_string() || text == "") return wrong(field, where + " must hold texts that are not empty");
    bytes += text.get_ref<const std::string&>().size();
    choices.push_back({{"type", "const_string"}, {"value", text}});
  }
  if (absl::Status size = check_grammar_bytes(bytes, where); !size.ok()) return with_field(size, field);
  return OrderedJson{{"type", "or"}, {"elements", std::move(choices)}};
}

absl::Status read_structured_outputs(const OrderedJson& outputs, GenerateRequest& request) {
  constexpr char kField[] = "structured_outputs";
  if (!outputs.is_object()) return wrong(kField, "'structured_outputs' must be an object");
  for (const auto& [key, value] : outputs.items()) {
    if (value.is_null()) continue;
    const std::string where = absl::StrCat(kField, ".", key);
    if (key == "json") {
      PARVL_RETURN_IF_ERROR(read_plain_schema(value, where, kField, request));
    } else if (key == "json_object") {
      if (!value.is_boolean()) return wrong(kField, where + " must be true or false");
      if (value == true) PARVL_RETURN_IF_ERROR(constrain(json_format(any_json_object()), kField, request));
    } else if (key == "regex") {
      if (!value.is_string()) return wrong(kField, where + " must be a string");
      const absl::Status pattern = check_pattern(value.get_ref<const std::string&>(), where);
      if (!pattern.ok()) return with_field(pattern, kField);
      PARVL_RETURN_IF_ERROR(constrain({{"type", "regex"}, {"pattern", value}}, kField, request));
    } else if (key == "choice") {
      PARVL_ASSIGN_OR_RETURN(const OrderedJson choices, read_choices(value, where, kField));
      PARVL_RETURN_IF_ERROR(constrain(choices, kField, request));
    } else {
      return unavailable(kField, "the form " + excerpt(key) + " (json, json_object, regex and choice are known) is");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ToolFunction> read_tool(const OrderedJson& tool, const std::string& where) {
  const OrderedJson* type = tool.is_object() ? find_ordered(tool, "type") : nullptr;
  const OrderedJson* function = type != nullptr ? find_ordered(tool, "function") : nullptr;
  if (type == nullptr || *type != "function" || function == nullptr || !function->is_object()) {
    return wrong("tools", where + " must be {\"type\": \"function\", \"function\": {\"name\": ..., ...}}");
  }
  const OrderedJson* name = find_ordered(*function, "name");
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
           c == '.';
  };
  const std::string text = name != nullptr && name->is_string() ? name->get<std::string>() : "";
  if (text.empty() || text.size() > kMaxNameBytes || !std::all_of(text.begin(), text.end(), allowed)) {
    return wrong("tools", absl::StrCat(where, ".function.name must be 1 to ", kMaxNameBytes,
                                       " letters, digits, dashes, dots and underscores"));
  }
  const OrderedJson* parameters = find_ordered(*function, "parameters");
  OrderedJson schema = parameters != nullptr ? *parameters : OrderedJson::object();
  if (schema.is_object() && schema.empty()) schema["properties"] = OrderedJson::object();  // no arguments
  if (!schema.is_object() || schema.value("type", OrderedJson("object")) != "object") {
    return wrong("tools", where + ".function.parameters must be a JSON schema of the type object");
  }
  if (!schema.contains("$ref")) schema["type"] = "object";
  const absl::StatusOr<OrderedJson> supported = supported_schema(schema, where + ".function.parameters");
  if (!supported.ok()) return with_field(supported.status(), "tools");
  if (!describes_object(*supported)) {
    return wrong("tools", where + ".function.parameters: its $ref must lead to a schema of the type object");
  }
  return ToolFunction{text, *supported};
}

// What tool_choice and parallel_tool_calls say.
struct ToolChoice {
  std::string kind = "auto";  // none, auto, required, or function: the one named
  std::string function;
  bool several = true;  // calls in one answer
};

absl::StatusOr<ToolChoice> read_tool_choice(const Json& body) {
  constexpr char kWanted[] =
      "'tool_choice' must be none, auto, required or {\"type\": \"function\", \"function\": {\"name\": ...}}";
  ToolChoice out;
  PARVL_RETURN_IF_ERROR(read_field(body, "parallel_tool_calls", out.several));
  const Json* choice = find_field(body, "tool_choice");
  if (choice == nullptr) return out;
  if (choice->is_string()) {
    out.kind = choice->get<std::string>();
    if (out.kind == "none" || out.kind == "auto" || out.kind == "required") return out;
    return wrong("tool_choice", absl::StrCat(kWanted, ", found ", excerpt(out.kind)));
  }
  const Json* type = choice->is_object() ? find_field(*choice, "type") : nullptr;
  const Json* function = type != nullptr && *type == "function" ? find_field(*choice, "function") : nullptr;
  const Json* name = function != nullptr && function->is_object() ? find_field(*function, "name") : nullptr;
  if (name == nullptr || !name->is_string()) return wrong("tool_choice", kWanted);
  return ToolChoice{"function", name->get<std::string>(), false};
}

absl::Status read_tools(const OrderedJson& tools, const ToolChoice& choice, const RequestRules& rules,
                        GenerateRequest& request) {
  if (tools.size() > kMaxTools) {
    return wrong("tools", absl::StrCat("'tools' may hold at most ", kMaxTools, " functions, found ", tools.size()));
  }
  if (rules.tools.family.empty()) return wrong("tools", "'tools': " + std::string(kNoToolSyntax));
  std::vector<ToolFunction> functions;
  size_t bytes = 0;
  for (size_t i = 0; i < tools.size(); ++i) {
    PARVL_ASSIGN_OR_RETURN(ToolFunction function, read_tool(tools[i], absl::StrCat("tools[", i, "]")));
    bytes += function.parameters.dump().size();
    const auto same = [&](const ToolFunction& other) { return other.name == function.name; };
    if (std::any_of(functions.begin(), functions.end(), same)) {
      return wrong("tools", absl::StrCat("'tools' holds ", excerpt(function.name), " twice; rename one"));
    }
    functions.push_back(std::move(function));
  }
  if (absl::Status size = check_grammar_bytes(bytes, "the schemas of 'tools' together"); !size.ok()) {
    return with_field(size, "tools");
  }
  if (choice.kind == "none") return absl::OkStatus();
  if (choice.kind == "function") {
    std::erase_if(functions, [&](const ToolFunction& function) { return function.name != choice.function; });
    if (functions.empty()) {
      return wrong("tool_choice",
                   absl::StrCat("'tool_choice' names ", excerpt(choice.function), ", which is not among 'tools'"));
    }
  }
  const std::string form = std::exchange(request.grammar, "");
  if (!form.empty() && request.grammar_field != "response_format") {
    return wrong(request.grammar_field, absl::StrCat("'", request.grammar_field,
                                                     "' beside 'tools' needs 'tool_choice' none; 'response_format' "
                                                     "takes calls or an answer of its form"));
  }
  const bool several = choice.several && rules.tools.parallel;
  if (choice.kind != "auto" || form.empty()) {  // where a call must come, no answer has a form
    const ToolUse use = choice.kind == "auto" ? ToolUse::kAuto : ToolUse::kRequired;
    request.grammar = tool_grammar(rules.tools, functions, use, several);
  } else if (rules.tools.begin.starts_with("{")) {
    return wrong("response_format",
                 "'response_format' beside 'tools' needs 'tool_choice' none or required: this model writes a call as "
                 "JSON, which could not be told from an answer in JSON");
  } else {
    request.grammar = tool_or_form_grammar(rules.tools, functions, form, several);
  }
  request.tools = tools;
  request.reads_calls = true;
  request.grammar_field = "tools";
  return absl::OkStatus();
}

}  // namespace

absl::Status read_output_form(std::string_view text, const Json& body, const RequestRules& rules,
                              GenerateRequest& request) {
  ToolChoice choice;
  const bool chat = request.api == Api::kChat;
  if (chat) {
    PARVL_ASSIGN_OR_RETURN(choice, read_tool_choice(body));
  }
  const Json* tools_field = chat ? find_field(body, "tools") : nullptr;
  if ((tools_field == nullptr || *tools_field == Json::array()) && choice.kind != "none" && choice.kind != "auto") {
    return wrong("tool_choice", "'tool_choice' needs 'tools'; list the functions there");
  }
  const std::vector<std::string> fields = {"response_format", "structured_outputs", "guided_json", "tools"};
  if (std::none_of(fields.begin(), fields.end(),
                   [&](const std::string& field) { return find_field(body, field.c_str()) != nullptr; })) {
    return absl::OkStatus();
  }
  PARVL_ASSIGN_OR_RETURN(const OrderedJson ordered, parse_ordered_json(text, "the body", fields));
  if (const OrderedJson* format = find_ordered(ordered, "response_format")) {
    PARVL_RETURN_IF_ERROR(read_response_format(*format, request));
  }
  if (const OrderedJson* outputs = find_ordered(ordered, "structured_outputs")) {
    PARVL_RETURN_IF_ERROR(read_structured_outputs(*outputs, request));
  }
  if (const OrderedJson* schema = find_ordered(ordered, "guided_json")) {
    PARVL_RETURN_IF_ERROR(read_plain_schema(*schema, "guided_json", "guided_json", request));
  }
  const OrderedJson* tools = chat ? find_ordered(ordered, "tools") : nullptr;
  if (tools == nullptr) return absl::OkStatus();
  if (!tools->is_array()) return wrong_type("tools", "a list of functions", Json(*tools));
  return tools->empty() ? absl::OkStatus() : read_tools(*tools, choice, rules, request);
}

absl::Status read_tool_calls(const Json& calls, const std::string& where, Message& message, size_t& argument_bytes) {
  if (!calls.is_array()) return wrong(where, where + " must be a list of calls");
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string place = absl::StrCat(where, "[", i, "]");
    const Json* function = calls[i].is_object() ? find_field(calls[i], "function") : nullptr;
    const Json* name = function != nullptr && function->is_object() ? find_field(*function, "name") : nullptr;
    if (name == nullptr || !name->is_string()) {
      return wrong(where, place +
                              " must be {\"id\": ..., \"type\": \"function\", \"function\": {\"name\": ..., "
                              "\"arguments\": ...}}");
    }
    ToolCall call;
    call.name = name->get<std::string>();
    if (const Json* id = find_field(calls[i], "id"); id != nullptr && id->is_string()) call.id = id->get<std::string>();
    call.arguments = OrderedJson::object();
    if (const Json* arguments = find_field(*function, "arguments"); arguments != nullptr && *arguments != "") {
      const std::string field = place + ".function.arguments";
      if (!arguments->is_string()) return wrong(where, field + " must be a string that holds a JSON object");
      const auto& text = arguments->get_ref<const std::string&>();
      argument_bytes += text.size();
      if (argument_bytes > kMaxArgumentBytes) {
        return wrong(where, absl::StrCat("the arguments of calls up to ", field, " have ", argument_bytes,
                                         " bytes together, over the limit of ", kMaxArgumentBytes));
      }
      const auto parsed = parse_ordered_json(text, field);
      if (!parsed.ok()) return with_field(parsed.status(), where);
      if (!parsed->is_object()) return wrong(where, field + " must hold a JSON object");
      call.arguments = *parsed;
    }
    message.tool_calls.push_back(std::move(call));
  }
  return absl::OkStatus();
}

}  // namespace parvl
