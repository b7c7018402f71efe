// What a request says about the form of its answer: response_format, tools, and vLLM's structured_outputs.
#pragma once

#include <string_view>

#include "parvl/base/json.h"
#include "parvl/serve/openai_request.h"

namespace parvl {

// Reads the fields from the body, and from its text where the order of keys counts: request.tools, grammar,
// grammar_field and reads_calls. Schemas are checked here; what compiling them finds out comes later.
absl::Status read_output_form(std::string_view text, const Json& body, const RequestRules& rules,
                              GenerateRequest& request);

// A message's tool_calls → message.tool_calls. `where` names the message. `argument_bytes`: what the arguments of the
// request's calls have together, those before included; bounded.
absl::Status read_tool_calls(const Json& calls, const std::string& where, Message& message, size_t& argument_bytes);

}  // namespace parvl
