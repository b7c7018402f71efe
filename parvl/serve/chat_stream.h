// A streamed chat completion as a client sees it: bytes of server-sent events → when text came, and the usage. Pure.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/json.h"

namespace parvl {

class ChatStream {
 public:
  // The next bytes of the body, which came at `now_s`. An error says why the stream is worth nothing: the server's own
  // error event, or what is no chat stream; nothing more may be pushed then.
  absl::Status push(std::string_view bytes, double now_s);

  bool done() const { return done_; }  // [DONE] came
  bool has_text() const { return has_text_; }
  double first_text_s() const { return first_text_s_; }  // of a stream without any text, when it was done
  double done_s() const { return done_s_; }
  bool has_usage() const { return has_usage_; }
  int64_t prompt_tokens() const { return prompt_tokens_; }
  int64_t output_tokens() const { return output_tokens_; }
  // Milliseconds between two pieces of text; 0 between two that came in one read.
  const std::vector<float>& gaps_ms() const { return gaps_ms_; }

 private:
  absl::Status take_line(std::string_view line, double now_s);
  absl::Status take_event(double now_s);
  absl::Status take_chunk(const Json& chunk, double now_s);

  std::string rest_;         // of a line whose end has not come
  std::string name_, data_;  // of the event whose end has not come
  bool done_ = false, has_text_ = false, has_usage_ = false;
  double first_text_s_ = 0, last_text_s_ = 0, done_s_ = 0;
  int64_t prompt_tokens_ = 0, output_tokens_ = 0;
  std::vector<float> gaps_ms_;
};

// The message of an OpenAI error object, {"error": {"message": ...}} or some servers' {"message": ...}; the beginning
// of the text when it is neither. One line.
std::string error_message(std::string_view body);

}  // namespace parvl
