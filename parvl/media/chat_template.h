// A model's chat template: messages → text, with the origin of every byte.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/json.h"
#include "parvl/base/status.h"
#include "parvl/media/jinja.h"
#include "parvl/media/prompt.h"
#include "parvl/media/tokenizer.h"

namespace parvl {

struct ChatTemplateLimits {
  size_t max_source_bytes = 1u << 20;
  size_t max_output_bytes = 64u << 20;
};

// Immutable after load; thread-safe.
class ChatTemplate {
 public:
  // Reads chat_template.jinja, else chat_template.json, else the one in tokenizer_config.json ("default" of a list),
  // and that file's special tokens, which templates may name. Null when the directory has none.
  static absl::StatusOr<std::shared_ptr<const ChatTemplate>> load(const std::string& dir, const Tokenizer& tokenizer,
                                                                  const ChatTemplateLimits& limits = {});
  // The same from the source. `special_tokens`: variables such as bos_token, an object of strings.
  static absl::StatusOr<std::shared_ptr<const ChatTemplate>> compile(const std::string& source,
                                                                     const Json& special_tokens,
                                                                     const Tokenizer& tokenizer,
                                                                     const ChatTemplateLimits& limits = {});

  // The whole text. Runs are trusted where the template wrote them; text of messages and template_arguments never is,
  // and the text of an added token inside it is kept apart even where the template took it to pieces. The content of a
  // message without media is given as a string where the template reads strings, else (and with media) as a list of
  // parts. InvalidArgument: the template's own complaint (raise_exception), or what failed in it.
  absl::StatusOr<std::vector<TextRun>> render(const std::vector<Message>& messages, const PromptOptions& options) const;

 private:
  ChatTemplate() = default;
  // Text from outside, with the guards around each added token in it.
  std::string guarded(const std::string& text) const;
  TemplateValue message_value(const Message& message) const;
  TemplateValue tool_call_value(const ToolCall& call) const;
  template <typename AnyJson>
  TemplateValue argument_value(const AnyJson& json) const;
  absl::StatusOr<std::vector<TextRun>> without_guards(const std::vector<TextRun>& runs) const;

  std::shared_ptr<const JinjaTemplate> template_;
  std::vector<std::pair<std::string, std::string>> special_tokens_;
  std::vector<std::string> added_;          // texts of added tokens, the longest first
  std::array<bool, 256> first_bytes_ = {};  // of those
  ChatTemplateLimits limits_;
};

}  // namespace parvl
