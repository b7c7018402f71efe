#include "parvl/media/chat_template.h"

#include <algorithm>

#include "parvl/base/file.h"
#include "parvl/media/unicode.h"

namespace parvl {
namespace {

// Put around an added token that a user typed. The engine follows the origin of text through most of what a template
// does, but not through all of it (JSON output, split); these two survive that. Unicode reserves them for such inner
// use; in text from outside they are dropped.
constexpr std::string_view kGuardBegin = "\uFDD0", kGuardEnd = "\uFDD1";
// A filter that writes JSON in ASCII spells them so.
constexpr std::string_view kEscapedBegin = "\\ufdd0", kEscapedEnd = "\\ufdd1";

// The kind of guard that starts at `at` and its length; 0 for none.
struct Guard {
  size_t length = 0;
  bool opens = false;
};
Guard guard_at(std::string_view text, size_t at, bool escaped_too) {
  const std::string_view rest = text.substr(at);
  if (rest.starts_with(kGuardBegin) || rest.starts_with(kGuardEnd)) {
    return {kGuardBegin.size(), rest.starts_with(kGuardBegin)};
  }
  // After another backslash it is JSON for a backslash that somebody typed.
  if (!escaped_too || (at > 0 && text[at - 1] == '\\')) return {};
  if (rest.starts_with(kEscapedBegin) || rest.starts_with(kEscapedEnd)) {
    return {kEscapedBegin.size(), rest.starts_with(kEscapedBegin)};
  }
  return {};
}

// A message of the engine's as one short line.
absl::Status cleaned(const absl::Status& status) {
  const std::string_view message(status.message().data(), status.message().size());
  std::string out;
  for (size_t at = 0; at < message.size();) {
    const Guard guard = guard_at(message, at, false);
    if (guard.length == 0) out += message[at];
    at += std::max<size_t>(guard.length, 1);
  }
  return invalid(one_line(out, 500));
}

// The template's source from what the configuration holds: a string, or a list of {name, template}.
absl::StatusOr<std::string> source_from(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array()) {
    for (const Json& item : value) {
      if (item.is_object() && item.value("name", Json()) == "default" && item.contains("template") &&
          item["template"].is_string()) {
        return item["template"].get<std::string>();
      }
    }
  }
  return invalid("'chat_template' must be a string, or a list with a template named \"default\"");
}

// bos_token and the like, each a string or an object with 'content'.
Json special_tokens_of(const Json& config) {
  Json out = Json::object();
  for (const auto& [key, value] : config.items()) {
    if (!key.ends_with("_token")) continue;
    if (value.is_string()) out[key] = value;
    if (value.is_object() && value.contains("content") && value["content"].is_string()) out[key] = value["content"];
  }
  return out;
}

absl::StatusOr<Json> read_optional_json(const std::string& path) {
  auto json = read_json_file(path);
  if (absl::IsNotFound(json.status())) return Json::object();
  if (json.ok() && !json->is_object()) return invalid(path, " must be a JSON object");
  return json;
}

// Some templates build a special token from the role, as '<|' + role + '|>'; these names are ours, not a user's.
bool is_known_role(const std::string& role) {
  return role == "system" || role == "user" || role == "assistant" || role == "tool" || role == "developer";
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ChatTemplate>> ChatTemplate::load(const std::string& dir,
                                                                       const Tokenizer& tokenizer,
                                                                       const ChatTemplateLimits& limits) {
  PARVL_ASSIGN_OR_RETURN(Json config, read_optional_json(dir + "/tokenizer_config.json"));
  std::string path = dir + "/chat_template.jinja";
  auto source = read_file(path, limits.max_source_bytes);
  if (absl::IsNotFound(source.status())) {
    path = dir + "/chat_template.json";
    PARVL_ASSIGN_OR_RETURN(Json holder, read_optional_json(path));
    if (!holder.contains("chat_template")) {
      path = dir + "/tokenizer_config.json";
      holder = config;
    }
    if (!holder.contains("chat_template") || holder["chat_template"].is_null()) return nullptr;
    source = source_from(holder["chat_template"]);
    if (!source.ok()) return with_context(source.status(), path);
  }
  PARVL_RETURN_IF_ERROR(source.status());
  auto made = compile(*source, special_tokens_of(config), tokenizer, limits);
  if (!made.ok()) return with_context(made.status(), path);
  return made;
}

absl::StatusOr<std::shared_ptr<const ChatTemplate>> ChatTemplate::compile(const std::string& source,
                                                                          const Json& special_tokens,
                                                                          const Tokenizer& tokenizer,
                                                                          const ChatTemplateLimits& limits) {
  if (source.size() > limits.max_source_bytes) {
    return invalid("chat template of ", source.size(), " bytes is over the limit of ", limits.max_source_bytes);
  }
  auto out = std::shared_ptr<ChatTemplate>(new ChatTemplate);
  auto compiled = JinjaTemplate::compile(source);
  if (!compiled.ok()) return with_context(cleaned(compiled.status()), "chat template");
  out->template_ = *std::move(compiled);
  out->limits_ = limits;
  for (const auto& [key, value] : special_tokens.items()) {
    out->special_tokens_.emplace_back(key, value.get<std::string>());
  }
  out->added_ = tokenizer.added_texts();
  std::stable_sort(out->added_.begin(), out->added_.end(),
                   [](const std::string& a, const std::string& b) { return a.size() > b.size(); });
  for (const std::string& token : out->added_) out->first_bytes_[static_cast<unsigned char>(token[0])] = true;
  return out;
}

std::string ChatTemplate::guarded(const std::string& text) const {
  std::string clean;
  for (size_t at = 0; at < text.size();) {
    const Guard guard = guard_at(text, at, false);
    if (guard.length == 0) clean += text[at];
    at += std::max<size_t>(guard.length, 1);
  }
  std::string out;
  for (size_t at = 0; at < clean.size();) {
    auto found = added_.end();
    if (first_bytes_[static_cast<unsigned char>(clean[at])]) {
      found = std::find_if(added_.begin(), added_.end(),
                           [&](const std::string& token) { return clean.compare(at, token.size(), token) == 0; });
    }
    if (found == added_.end()) {
      out += clean[at++];
      continue;
    }
    out += kGuardBegin;
    out += *found;
    out += kGuardEnd;
    at += found->size();
  }
  return out;
}

TemplateValue ChatTemplate::message_value(const Message& message) const {
  const bool has_media = std::any_of(message.content.begin(), message.content.end(),
                                     [](const ContentPart& part) { return part.kind != ContentPart::Kind::kText; });
  TemplateValue content;
  if (!has_media && template_->reads_string_content()) {
    std::string text;
    for (const ContentPart& part : message.content) text += part.text;
    content = TemplateValue::of_text(guarded(text), false);
  } else {
    content = TemplateValue::of_list();
    for (const ContentPart& part : message.content) {
      TemplateValue value = TemplateValue::of_object();
      const bool is_text = part.kind == ContentPart::Kind::kText;
      value.add("type", TemplateValue::of_text(is_text ? "text" : "image", true));
      if (is_text) value.add("text", TemplateValue::of_text(guarded(part.text), false));
      content.items.push_back(std::move(value));
    }
  }
  const bool known = is_known_role(message.role);
  TemplateValue out = TemplateValue::of_object();
  out.add("role", TemplateValue::of_text(known ? message.role : guarded(message.role), known));
  out.add("content", std::move(content));
  if (!message.tool_calls.empty()) {
    TemplateValue calls = TemplateValue::of_list();
    for (const ToolCall& call : message.tool_calls) calls.items.push_back(tool_call_value(call));
    out.add("tool_calls", std::move(calls));
  }
  if (!message.tool_call_id.empty()) {
    out.add("tool_call_id", TemplateValue::of_text(guarded(message.tool_call_id), false));
  }
  if (!message.name.empty()) out.add("name", TemplateValue::of_text(guarded(message.name), false));
  return out;
}

TemplateValue ChatTemplate::tool_call_value(const ToolCall& call) const {
  TemplateValue function = TemplateValue::of_object();
  function.add("name", TemplateValue::of_text(guarded(call.name), false));
  function.add("arguments", argument_value(call.arguments));
  TemplateValue out = TemplateValue::of_object();
  out.add("id", TemplateValue::of_text(guarded(call.id), false));
  out.add("type", TemplateValue::of_text("function", true));
  out.add("function", std::move(function));
  return out;
}

// Json or OrderedJson.
template <typename AnyJson>
TemplateValue ChatTemplate::argument_value(const AnyJson& json) const {
  TemplateValue out;
  if (json.is_boolean()) return TemplateValue::of_bool(json.template get<bool>());
  if (json.is_string()) return TemplateValue::of_text(guarded(json.template get<std::string>()), false);
  if (json.is_number_float()) {
    out.kind = TemplateValue::Kind::kFloat;
    out.real = json.template get<double>();
  } else if (json.is_number()) {
    out.kind = TemplateValue::Kind::kInt;
    out.integer = json.template get<int64_t>();
  } else if (json.is_array()) {
    out.kind = TemplateValue::Kind::kList;
    for (const AnyJson& item : json) out.items.push_back(argument_value(item));
  } else if (json.is_object()) {
    out.kind = TemplateValue::Kind::kObject;
    for (const auto& [key, value] : json.items()) out.add(guarded(key), argument_value(value));
  }
  return out;
}

absl::StatusOr<std::vector<TextRun>> ChatTemplate::without_guards(const std::vector<TextRun>& runs) const {
  std::vector<TextRun> out;
  const auto append = [&](std::string_view text, bool trusted) {
    if (text.empty()) return;
    if (!out.empty() && out.back().trusted == trusted) {
      out.back().text += text;
    } else {
      out.push_back({std::string(text), trusted});
    }
  };
  size_t total = 0;
  bool inside = false;  // between guards: a user's, whatever the engine says
  for (const TextRun& run : runs) {
    total += run.text.size();
    if (total > limits_.max_output_bytes) {
      return invalid("the chat template writes more than the limit of ", limits_.max_output_bytes, " bytes");
    }
    size_t done = 0;
    for (size_t at = 0; at < run.text.size();) {
      // Only JSON output, which the engine takes for the template's own, can hold escaped guards.
      const Guard guard = guard_at(run.text, at, run.trusted);
      if (guard.length == 0) {
        ++at;
        continue;
      }
      append(std::string_view(run.text).substr(done, at - done), run.trusted && !inside);
      inside = guard.opens;
      at += guard.length;
      done = at;
    }
    append(std::string_view(run.text).substr(done), run.trusted && !inside);
  }
  return out;
}

absl::StatusOr<std::vector<TextRun>> ChatTemplate::render(const std::vector<Message>& messages,
                                                          const PromptOptions& options) const {
  TemplateValue globals = TemplateValue::of_object();
  globals.add("tools", argument_value(options.tools));
  globals.add("documents", {});
  for (const auto& [name, text] : special_tokens_) {
    globals.add(name, TemplateValue::of_text(text, true));
  }
  if (!options.template_arguments.is_null()) {
    if (!options.template_arguments.is_object()) return invalid("the chat template's arguments must be an object");
    for (const auto& [key, value] : options.template_arguments.items()) {
      globals.add(key, argument_value(value));
    }
  }
  TemplateValue values = TemplateValue::of_list();
  for (const Message& message : messages) values.items.push_back(message_value(message));
  globals.add("messages", std::move(values));
  globals.add("add_generation_prompt", TemplateValue::of_bool(options.add_generation_prompt));
  auto runs = template_->render(globals);
  if (!runs.ok()) return with_context(cleaned(runs.status()), "chat template");
  return without_guards(*runs);
}

}  // namespace parvl
