#include "parvl/media/jinja.h"

#include <mutex>

#include "jinja/caps.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "jinja/value.h"
#include "parvl/media/jinja_limits.h"

namespace parvl {
namespace {

jinja::value to_engine(const TemplateValue& value) {
  switch (value.kind) {
    case TemplateValue::Kind::kNone:
      return jinja::mk_val<jinja::value_none>();
    case TemplateValue::Kind::kBool:
      return jinja::mk_val<jinja::value_bool>(value.flag);
    case TemplateValue::Kind::kInt:
      return jinja::mk_val<jinja::value_int>(value.integer);
    case TemplateValue::Kind::kFloat:
      return jinja::mk_val<jinja::value_float>(value.real);
    case TemplateValue::Kind::kText: {
      auto text = jinja::mk_val<jinja::value_string>(value.text.text);
      if (!value.text.trusted) text->mark_input();
      return text;
    }
    case TemplateValue::Kind::kList: {
      auto list = jinja::mk_val<jinja::value_array>();
      for (const TemplateValue& item : value.items) list->push_back(to_engine(item));
      return list;
    }
    case TemplateValue::Kind::kObject: {
      auto object = jinja::mk_val<jinja::value_object>();
      for (size_t i = 0; i < value.items.size(); ++i) object->insert(value.keys[i], to_engine(value.items[i]));
      return object;
    }
  }
  return jinja::mk_val<jinja::value_none>();
}

std::string first_line(const std::string& text) {
  const size_t begin = text.find_first_not_of('\n');
  return begin == std::string::npos ? "unknown error" : text.substr(begin, text.find('\n', begin) - begin);
}

// One sentence from the engine's report, which shows the source around the place as well.
std::string reason(const std::string& report) {
  constexpr char kRaised[] = "Error: Jinja Exception: ", kError[] = "Error: ", kAt[] = " at line ";
  if (const size_t at = report.find(kRaised); at != std::string::npos) return report.substr(at + sizeof(kRaised) - 1);
  const size_t error = report.find(kError), place = report.find(kAt);
  if (error == std::string::npos || place == std::string::npos) return first_line(report);
  const size_t place_end = report.find(" in source", place);
  return report.substr(error + sizeof(kError) - 1) + " (" +
         report.substr(place + 4, place_end == std::string::npos ? 0 : place_end - place - 4) + ")";
}

}  // namespace

TemplateValue TemplateValue::of_bool(bool value) {
  TemplateValue out;
  out.kind = Kind::kBool;
  out.flag = value;
  return out;
}

TemplateValue TemplateValue::of_list() {
  TemplateValue out;
  out.kind = Kind::kList;
  return out;
}

TemplateValue TemplateValue::of_object() {
  TemplateValue out;
  out.kind = Kind::kObject;
  return out;
}

void TemplateValue::add(std::string key, TemplateValue value) {
  keys.push_back(std::move(key));
  items.push_back(std::move(value));
}

TemplateValue TemplateValue::of_text(std::string value, bool trusted) {
  TemplateValue out;
  out.kind = Kind::kText;
  out.text = {std::move(value), trusted};
  return out;
}

struct JinjaTemplate::Impl {
  std::string source;
  jinja::program program;
  jinja::caps caps;
  // The engine formats dates through a buffer that the C library shares between threads.
  bool reads_clock = false;
  std::mutex clock_mutex;
};

JinjaTemplate::JinjaTemplate(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
JinjaTemplate::~JinjaTemplate() = default;
bool JinjaTemplate::reads_string_content() const { return impl_->caps.supports_string_content; }
bool JinjaTemplate::reads_typed_content() const { return impl_->caps.supports_typed_content; }

absl::StatusOr<std::shared_ptr<const JinjaTemplate>> JinjaTemplate::compile(const std::string& source) {
  auto impl = std::make_unique<Impl>();
  impl->source = source;
  impl->reads_clock = source.find("strftime_now") != std::string::npos;
  try {
    const TemplateLeftovers leftovers;
    const TemplateBudget budget;
    jinja::lexer lexer;
    impl->program = jinja::parse_from_tokens(lexer.tokenize(source));
    impl->caps = jinja::caps_get(impl->program);
  } catch (const std::exception& e) {
    return invalid(first_line(e.what()));
  }
  return std::shared_ptr<const JinjaTemplate>(new JinjaTemplate(std::move(impl)));
}

absl::StatusOr<std::vector<TextRun>> JinjaTemplate::render(const TemplateValue& globals) const {
  std::unique_lock<std::mutex> lock(impl_->clock_mutex, std::defer_lock);
  if (impl_->reads_clock) lock.lock();
  try {
    const TemplateLeftovers leftovers;
    jinja::context context(impl_->source);
    for (size_t i = 0; i < globals.items.size(); ++i) context.set_val(globals.keys[i], to_engine(globals.items[i]));
    const TemplateBudget budget;
    jinja::runtime runtime(context);
    const auto parts = jinja::runtime::gather_string_parts(runtime.execute(impl_->program));
    std::vector<TextRun> runs;
    for (const jinja::string_part& part : parts->val_str.parts) {
      if (!part.val.empty()) runs.push_back({part.val, !part.is_input});
    }
    return runs;
  } catch (const std::exception& e) {
    return invalid(reason(e.what()));
  }
}

}  // namespace parvl
