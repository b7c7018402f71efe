// A compiled Jinja template and the values given to it. Hides the engine, whose headers only jinja.cc includes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parvl/base/status.h"
#include "parvl/media/tokenizer.h"

namespace parvl {

// What a template computes with: JSON, and for each text whether it is trusted (written by the operator) or came from a
// user.
struct TemplateValue {
  enum class Kind { kNone, kBool, kInt, kFloat, kText, kList, kObject };
  Kind kind = Kind::kNone;
  bool flag = false;
  int64_t integer = 0;
  double real = 0;
  TextRun text;
  std::vector<TemplateValue> items;  // kList; kObject: the values, in order
  std::vector<std::string> keys;     // kObject: of each item

  static TemplateValue of_bool(bool value);
  static TemplateValue of_list();
  static TemplateValue of_object();
  static TemplateValue of_text(std::string value, bool trusted);
  // On an object.
  void add(std::string key, TemplateValue value);
};

// Immutable after compile; thread-safe.
class JinjaTemplate {
 public:
  // InvalidArgument when the source does not parse.
  static absl::StatusOr<std::shared_ptr<const JinjaTemplate>> compile(const std::string& source);
  ~JinjaTemplate();

  // Runs the template with `globals` (an object). The result's runs are trusted where the template wrote the text.
  // InvalidArgument: the message of the template's raise_exception, or what went wrong in it.
  absl::StatusOr<std::vector<TextRun>> render(const TemplateValue& globals) const;

  // How the template reads a message's content, found by trying: as one string, as a list of typed parts, or both.
  bool reads_string_content() const;
  bool reads_typed_content() const;

 private:
  struct Impl;
  explicit JinjaTemplate(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace parvl
