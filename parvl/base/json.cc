#include "parvl/base/json.h"

#include <limits>

#include "parvl/base/file.h"

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

absl::StatusOr<Json> parse_json(std::string_view text, const std::string& name, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return invalid(name, ": JSON of ", text.size(), " bytes is over the limit of ", limits.max_bytes);
  }
  if (deeper_than(text, limits.max_depth)) return invalid(name, ": JSON nested deeper than ", limits.max_depth);
  try {
    return Json::parse(text);
  } catch (const Json::exception& e) {
    std::string message = e.what();  // "[json.exception.parse_error.101] parse error at line 1, column 5: ..."
    const size_t bracket = message.find("] ");
    if (bracket != std::string::npos) message = message.substr(bracket + 2);
    if (message.size() > 300) message.resize(300);
    // A cut or a byte that is not UTF-8 must not reach a reader of the message.
    for (char& c : message) {
      if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
    }
    return invalid(name, ": not valid JSON: ", message);
  }
}

absl::StatusOr<Json> read_json_file(const std::string& path, const JsonLimits& limits) {
  PARVL_ASSIGN_OR_RETURN(std::string text, read_file(path, limits.max_bytes));
  return parse_json(text, path, limits);
}

namespace {
template <typename T>
absl::Status wrong_type(const std::string& key, const char* wanted, const Json& value) {
  return invalid("'", key, "' must be ", wanted, ", found ", value.type_name());
}
}  // namespace

template <>
absl::StatusOr<bool> json_value(const Json& object, const std::string& key, const bool& fallback) {
  auto it = object.find(key);
  if (it == object.end() || it->is_null()) return fallback;
  if (!it->is_boolean()) return wrong_type<bool>(key, "true or false", *it);
  return it->get<bool>();
}

template <>
absl::StatusOr<int64_t> json_value(const Json& object, const std::string& key, const int64_t& fallback) {
  auto it = object.find(key);
  if (it == object.end() || it->is_null()) return fallback;
  if (it->is_number_unsigned() && it->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return invalid("'", key, "' is too large");
  }
  if (it->is_number_float()) {
    const double value = it->get<double>();
    if (value == static_cast<double>(static_cast<int64_t>(value < 9e15 && value > -9e15 ? value : 0.5))) {
      return static_cast<int64_t>(value);
    }
  }
  if (!it->is_number_integer()) return wrong_type<int64_t>(key, "a whole number", *it);
  return it->get<int64_t>();
}

template <>
absl::StatusOr<double> json_value(const Json& object, const std::string& key, const double& fallback) {
  auto it = object.find(key);
  if (it == object.end() || it->is_null()) return fallback;
  if (!it->is_number()) return wrong_type<double>(key, "a number", *it);
  return it->get<double>();
}

template <>
absl::StatusOr<std::string> json_value(const Json& object, const std::string& key, const std::string& fallback) {
  auto it = object.find(key);
  if (it == object.end() || it->is_null()) return fallback;
  if (!it->is_string()) return wrong_type<std::string>(key, "a string", *it);
  return it->get<std::string>();
}

}  // namespace parvl
