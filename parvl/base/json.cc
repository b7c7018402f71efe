#include "parvl/base/json.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "parvl/base/file.h"
#include "parvl/base/ordered_json.h"

namespace parvl {
namespace {

// Depth by a scan before parsing, since the parser itself recurses on what it built when values are destroyed.
bool deeper_than(std::string_view text, int max_depth) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > max_depth) return true;
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return false;
}

}  // namespace

namespace {

// `Value`: Json or OrderedJson.
template <typename Value, typename Parse>
absl::StatusOr<Value> parse_within(std::string_view text, const std::string& name, const JsonLimits& limits,
                                   const Parse& parse) {
  if (text.size() > limits.max_bytes) {
    return invalid(name, ": JSON of ", text.size(), " bytes is over the limit of ", limits.max_bytes);
  }
  if (deeper_than(text, limits.max_depth)) return invalid(name, ": JSON nested deeper than ", limits.max_depth);
  try {
    return parse();
  } catch (const Json::exception& e) {
    std::string message = e.what();  // "[json.exception.parse_error.101] parse error at line 1, column 5: ..."
    const size_t bracket = message.find("] ");
    if (bracket != std::string::npos) message = message.substr(bracket + 2);
    if (message.size() > 300) message.resize(300);
    // A cut or a byte that is not UTF-8 must not reach a reader of the message.
    for (char& c : message) {
      if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
    }
    // In a text of one line the place in it is enough: `name` may say another line, of a file.
    constexpr std::string_view kOnlyLine = "at line 1, column ";
    const size_t place = message.find(kOnlyLine);
    if (place != std::string::npos && text.find('\n') == std::string_view::npos) {
      message.replace(place, kOnlyLine.size(), "at column ");
    }
    return invalid(name, ": not valid JSON: ", message);
  }
}

}  // namespace

absl::StatusOr<Json> parse_json(std::string_view text, const std::string& name, const JsonLimits& limits) {
  return parse_within<Json>(text, name, limits, [&] { return Json::parse(text); });
}

absl::StatusOr<OrderedJson> parse_ordered_json(std::string_view text, const std::string& name,
                                               const std::vector<std::string>& keys, const JsonLimits& limits) {
  std::vector<size_t> counts;  // by depth: the keys of the object that is being read there
  bool kept = keys.empty(), too_many = false;
  const auto wanted = [&](int depth, OrderedJson::parse_event_t event, const OrderedJson& value) {
    const auto level = static_cast<size_t>(depth);
    if (event == OrderedJson::parse_event_t::object_start) {
      counts.resize(level + 2);
      counts[level + 1] = 0;
    }
    if (event != OrderedJson::parse_event_t::key) return true;
    if (level == 1 && !keys.empty()) {
      kept = std::find(keys.begin(), keys.end(), value.get_ref<const std::string&>()) != keys.end();
      return kept;
    }
    too_many |= kept && ++counts[level] > kMaxOrderedKeys;
    return kept && !too_many;
  };
  auto parsed = parse_within<OrderedJson>(text, name, limits, [&] { return OrderedJson::parse(text, wanted); });
  if (parsed.ok() && too_many) return invalid(name, ": an object has more than ", kMaxOrderedKeys, " keys");
  return parsed;
}

absl::StatusOr<Json> read_json_file(const std::string& path, const JsonLimits& limits) {
  PARVL_ASSIGN_OR_RETURN(std::string text, read_file(path, limits.max_bytes));
  return parse_json(text, path, limits);
}

std::string shown(const Json& value) { return value.is_number() ? value.dump() : value.type_name(); }

namespace {
absl::Status wrong_type(const std::string& key, const char* wanted, const Json& value) {
  return invalid("'", key, "' must be ", wanted, ", found ", shown(value));
}
}  // namespace

template <>
absl::StatusOr<bool> json_value(const Json& object, const std::string& key, const bool& fallback) {
  auto it = object.find(key);
  if (it == object.end() || it->is_null()) return fallback;
  if (!it->is_boolean()) return wrong_type(key, "true or false", *it);
  return it->get<bool>();
}

template <>
absl::StatusOr<int64_t> json_value(const Json& object, const std::string& key, const int64_t& fallback) {
  auto it = object.find(key);
  if (it == object.end() || it->is_null()) return fallback;
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max(), kMin = std::numeric_limits<int64_t>::min();
  constexpr double kBeyond = 0x1p63;
  const double real = it->is_number_float() ? it->get<double>() : 0;
  // The parser makes floats of whole numbers that are too long, and some write 7 as 7.0.
  const bool whole = it->is_number_integer() || (it->is_number_float() && std::trunc(real) == real);
  if (!whole) return wrong_type(key, "a whole number", *it);
  const bool too_large = real >= kBeyond || (it->is_number_unsigned() && it->get<uint64_t>() > uint64_t{kMax});
  if (too_large) return invalid("'", key, "' is too large: it must be at most ", kMax, ", found ", shown(*it));
  if (real < -kBeyond) return invalid("'", key, "' is too small: it must be at least ", kMin, ", found ", shown(*it));
  return it->is_number_float() ? static_cast<int64_t>(real) : it->get<int64_t>();
}

template <>
absl::StatusOr<double> json_value(const Json& object, const std::string& key, const double& fallback) {
  auto it = object.find(key);
  if (it == object.end() || it->is_null()) return fallback;
  if (!it->is_number()) return wrong_type(key, "a number", *it);
  return it->get<double>();
}

template <>
absl::StatusOr<std::string> json_value(const Json& object, const std::string& key, const std::string& fallback) {
  auto it = object.find(key);
  if (it == object.end() || it->is_null()) return fallback;
  if (!it->is_string()) return wrong_type(key, "a string", *it);
  return it->get<std::string>();
}

}  // namespace parvl
