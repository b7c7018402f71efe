// What the Jinja engine's values lack: bounds on the built-in functions that can take or write far more than they are
// given (cmake/jinja.cmake puts the calls in), an end without recursion, and an end of those that hold themselves.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "jinja/value.h"
#include "parvl/media/jinja_limits.h"

namespace jinja {
namespace {

using parvl::spend_template_bytes;
using parvl::spend_template_steps;

int64_t to_int(size_t size) { return static_cast<int64_t>(size); }

// Moving memory is so much cheaper than what else is done with a byte.
constexpr int64_t kMovedPerByte = 32;

int64_t occurrences(const std::string& text, const std::string& part) {
  if (part.empty()) return to_int(text.size()) + 1;
  // What the search may cost where the text is all beginnings of the part.
  spend_template_bytes(to_int(text.size()) * (to_int(part.size()) / 256 + 1) / kMovedPerByte);
  int64_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

const value& argument(const std::vector<value>& args, const char* name, size_t position) {
  static const value none = mk_val<value_undefined>();
  for (const value& arg : args) {
    if (const auto* named = dynamic_cast<const value_kwarg_t*>(arg.get()); named && named->key == name)
      return named->val;
  }
  return position < args.size() ? args[position] : none;
}

std::string text_of(const value& arg) { return is_val<value_string>(arg) ? arg->as_string().str() : std::string(); }

void check_range(const std::vector<value>& args) {
  for (const value& arg : args) {
    if (!is_val<value_int>(arg)) return;  // range itself complains
  }
  const int64_t start = args.size() > 1 ? args[0]->as_int() : 0;
  const int64_t stop = args.size() > 1 ? args[1]->as_int() : args.empty() ? 0 : args[0]->as_int();
  const int64_t step = args.size() > 2 ? args[2]->as_int() : 1;
  if (step == 0) return;
  const double count = (static_cast<double>(stop) - static_cast<double>(start)) / static_cast<double>(step);
  const int64_t limit = parvl::template_budget::limits().range;
  if (count > static_cast<double>(limit)) {
    throw std::runtime_error("range() of more than the limit of " + std::to_string(limit) + " elements");
  }
}

// Each occurrence moves the rest of the text.
void check_split(const std::vector<value>& args) {
  const std::string text = text_of(args[0]);
  const std::string delimiter = args.size() > 1 ? text_of(args[1]) : " ";
  if (!delimiter.empty()) spend_template_bytes(occurrences(text, delimiter) * to_int(text.size()) / kMovedPerByte);
}

void check_replace(const std::vector<value>& args) {
  if (args.size() < 3) return;
  const std::string text = text_of(args[0]), from = text_of(args[1]), to = text_of(args[2]);
  const int64_t count = occurrences(text, from);
  // One by one, since a product of three lengths could be too large for a number.
  for (int64_t i = 0; i < count; ++i) spend_template_bytes(to_int(to.size()));
  if (from.size() != to.size() && !from.empty()) {
    for (int64_t i = 0; i < count; ++i) spend_template_bytes(to_int(text.size()) / kMovedPerByte);
  }
}

void check_indent(const std::vector<value>& args) {
  const std::string text = text_of(args[0]);
  const value& width = argument(args, "width", 1);
  const int64_t each = is_val<value_int>(width) ? std::max<int64_t>(width->as_int(), 0) : to_int(text_of(width).size());
  const int64_t lines = std::count(text.begin(), text.end(), '\n') + 1;
  spend_template_bytes(each);
  for (int64_t i = 0; i < lines; ++i) spend_template_bytes(each);
}

void check_join(const std::vector<value>& args) {
  const int64_t between = to_int(text_of(argument(args, "d", 1)).size());
  if (!is_val<value_array>(args[0])) return;
  for (size_t i = 0; i < args[0]->val_arr.size(); ++i) spend_template_bytes(between + 1);
}

void take_apart(std::vector<value>& waiting, value& item) {
  // Only what would take further values with it: that is where recursion comes from.
  if (item != nullptr && item.use_count() == 1 && (!item->val_arr.empty() || !item->val_obj.empty())) {
    waiting.push_back(std::move(item));
  }
}

// What was given something to hold after it was made: only those can hold themselves.
thread_local std::vector<std::weak_ptr<value_t>> g_changed;

}  // namespace

void note_change(const value& container, const value& item) {
  // A function holds what it was taken from, or the variables around it.
  if (is_val<value_array>(item) || is_val<value_object>(item) || item->val_func) g_changed.push_back(container);
}

// Lists in lists in lists, as many as a loop makes, would be destroyed by as many calls one in another.
value_t::~value_t() {
  thread_local std::vector<value> waiting;
  thread_local bool under_way = false;
  for (value& item : val_arr) take_apart(waiting, item);
  for (auto& [key, item] : val_obj) take_apart(waiting, item);
  if (std::exchange(under_way, true)) return;
  while (!waiting.empty()) {
    const value next = std::move(waiting.back());
    waiting.pop_back();
  }
  under_way = false;
}

// Before every built-in function: what it is about to do, which nothing in it counts.
void check_call(const std::string& name, const std::vector<value>& args) {
  for (const value& arg : args) spend_template_steps(to_int(arg->val_arr.size() + arg->val_obj.size()));
  if (name == "range") return check_range(args);
  if (args.empty()) return;
  if (name == "split" || name == "rsplit") check_split(args);
  if (name == "replace") check_replace(args);
  if (name == "indent") check_indent(args);
  if (name == "join") check_join(args);
}

}  // namespace jinja

namespace parvl {

TemplateLeftovers::~TemplateLeftovers() {
  for (const std::weak_ptr<jinja::value_t>& changed : std::exchange(jinja::g_changed, {})) {
    const jinja::value left = changed.lock();
    if (left == nullptr) continue;
    left->val_arr.clear();
    left->val_obj.clear();
    if (auto* object = dynamic_cast<jinja::value_object_t*>(left.get())) object->unordered.clear();
  }
}

}  // namespace parvl
