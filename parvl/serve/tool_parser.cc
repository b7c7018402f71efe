#include "parvl/serve/tool_parser.h"

#include <algorithm>
#include <utility>

namespace parvl {
namespace {

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

}  // namespace

void ToolParser::append(ToolEvent::Kind kind, std::string_view text, std::vector<ToolEvent>& out) {
  if (text.empty()) return;
  if (out.empty() || out.back().kind != kind) out.push_back({kind, ""});
  out.back().text += text;
}

std::vector<ToolEvent> ToolParser::push(std::string_view text) {
  std::vector<ToolEvent> out;
  for (const char c : text) step(c, out);
  return out;
}

std::vector<ToolEvent> ToolParser::finish() {
  std::vector<ToolEvent> out;
  const bool only_space = std::all_of(held_.begin(), held_.end(), is_space);
  if (state_ == State::kText && !(found_calls_ && only_space)) append(ToolEvent::Kind::kText, held_, out);
  held_.clear();
  return out;
}

void ToolParser::step(char c, std::vector<ToolEvent>& out) {
  switch (state_) {
    case State::kText:
      return step_text(c, out);
    case State::kName:
      if (!syntax_.middle.empty() && c == syntax_.middle[0]) {  // a name holds none of it
        out.push_back({ToolEvent::Kind::kCall, std::exchange(held_, {})});
        found_calls_ = true;
        matched_ = 0;
        state_ = State::kMiddle;
        return skip(syntax_.middle, State::kArguments);
      }
      held_ += c;
      return;
    case State::kMiddle:
      return skip(syntax_.middle, State::kArguments);
    case State::kArguments:
      return step_arguments(c, out);
    case State::kEnd:
      return skip(syntax_.end, State::kText);
  }
}

// One more byte of the literal is gone.
void ToolParser::skip(const std::string& literal, State next) {
  if (++matched_ < literal.size()) return;
  matched_ = 0;
  depth_ = 0;
  in_string_ = escaped_ = false;
  state_ = next;
}

void ToolParser::step_text(char c, std::vector<ToolEvent>& out) {
  held_ += c;
  const std::string& begin = syntax_.begin;
  // The longest beginning of `begin` that the text now ends with.
  size_t length = std::min(matched_ + 1, begin.size());
  while (length > 0 && !std::string_view(held_).ends_with(std::string_view(begin).substr(0, length))) --length;
  matched_ = length;
  if (matched_ == begin.size()) {
    std::string before = held_.substr(0, held_.size() - begin.size());
    while (!before.empty() && is_space(before.back())) before.pop_back();
    append(ToolEvent::Kind::kText, before, out);
    held_.clear();
    matched_ = spaces_ = 0;
    state_ = State::kName;
    return;
  }
  // What is certainly content: up to the white space before what may become a call.
  const size_t end = held_.size() - matched_;  // it only grows, so that no white space is looked at twice
  size_t sure = end;
  while (sure > spaces_ && is_space(held_[sure - 1])) --sure;
  if (sure == spaces_) sure = 0;
  append(ToolEvent::Kind::kText, std::string_view(held_).substr(0, sure), out);
  held_.erase(0, sure);
  spaces_ = end - sure;
}

void ToolParser::step_arguments(char c, std::vector<ToolEvent>& out) {
  append(ToolEvent::Kind::kArguments, {&c, 1}, out);
  if (in_string_) {
    if (escaped_) {
      escaped_ = false;
    } else if (c == '\\') {
      escaped_ = true;
    } else if (c == '"') {
      in_string_ = false;
    }
    return;
  }
  if (c == '"') in_string_ = true;
  if (c == '{' || c == '[') ++depth_;
  if (c == '}' || c == ']') --depth_;
  if (depth_ > 0 || is_space(c)) return;
  state_ = State::kEnd;
  matched_ = 0;
}

}  // namespace parvl
