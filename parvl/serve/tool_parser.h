// Finds the calls of tools in an answer's text as it grows. Pure.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "parvl/media/tool_syntax.h"

namespace parvl {

// What a piece of the answer's text turned out to be.
struct ToolEvent {
  enum class Kind { kText, kCall, kArguments };  // of the content; a call begins; of the last call's arguments
  Kind kind = Kind::kText;
  std::string text;  // kCall: the function's name
};

// One answer's text. Calls must be whole, as a grammar makes them, but may be cut anywhere by the end of the text.
// White space beside calls is no content.
class ToolParser {
 public:
  explicit ToolParser(ToolSyntax syntax) : syntax_(std::move(syntax)) {}

  std::vector<ToolEvent> push(std::string_view text);
  // After the last push: what still waited to be told apart.
  std::vector<ToolEvent> finish();
  // So far, or after finish() at the end: a call has begun and its end has not come.
  bool inside_call() const { return state_ != State::kText; }

 private:
  enum class State { kText, kName, kMiddle, kArguments, kEnd };
  void step(char c, std::vector<ToolEvent>& out);
  void step_text(char c, std::vector<ToolEvent>& out);
  void step_arguments(char c, std::vector<ToolEvent>& out);
  void skip(const std::string& literal, State next);
  static void append(ToolEvent::Kind kind, std::string_view text, std::vector<ToolEvent>& out);

  const ToolSyntax syntax_;
  State state_ = State::kText;
  std::string held_;    // kText: white space, then a beginning of syntax_.begin; kName: the name so far
  size_t spaces_ = 0;   // kText: bytes at the beginning of held_ that are known to be white space
  size_t matched_ = 0;  // kText: bytes of syntax_.begin at the end of held_; kMiddle, kEnd: bytes that were skipped
  int depth_ = 0;       // kArguments
  bool in_string_ = false, escaped_ = false;
  bool found_calls_ = false;
};

}  // namespace parvl
