// How a model family writes calls of tools, found by asking its chat template; and the grammars of such calls.
#pragma once

#include <string>
#include <vector>

#include "parvl/base/ordered_json.h"

namespace parvl {

class ChatTemplate;

// A call reads: begin, the function's name, middle, its arguments as a JSON object, end.
struct ToolSyntax {
  std::string family;   // "hermes" (Qwen and others) or "llama3_json"; "": the template knows no calls in a known form
  std::string trigger;  // how begin begins: text that is never anything but a call
  std::string begin, middle, end;
  std::string separator;  // between two calls
  bool parallel = false;  // an answer may hold several calls
};

// Renders a conversation with a call in it and looks at what became of it.
ToolSyntax find_tool_syntax(const ChatTemplate& chat);

struct ToolFunction {
  std::string name;
  OrderedJson parameters;  // supported_schema's, of an object
};

enum class ToolUse { kAuto, kRequired };  // text with calls in it, or calls alone
// A grammar's source (grammar.h). `several`: more than one call in an answer.
std::string tool_grammar(const ToolSyntax& syntax, const std::vector<ToolFunction>& functions, ToolUse use,
                         bool several);
// The same without text: calls, or an answer of the form that the grammar `form` describes.
std::string tool_or_form_grammar(const ToolSyntax& syntax, const std::vector<ToolFunction>& functions,
                                 const std::string& form, bool several);

}  // namespace parvl
