// JSON with limits: every JSON text that enters the program (files, HTTP bodies) goes through parse_json.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "parvl/base/status.h"

namespace parvl {

using Json = nlohmann::json;

struct JsonLimits {
  size_t max_bytes = 256u << 20;
  int max_depth = 64;
};

// Parses `text` (UTF-8). `name` is what an error message calls it. Duplicate keys: the last wins.
absl::StatusOr<Json> parse_json(std::string_view text, const std::string& name, const JsonLimits& limits = {});

// Reads and parses a file.
absl::StatusOr<Json> read_json_file(const std::string& path, const JsonLimits& limits = {});

// What an error message calls a value: a number as it is ("1.5"), anything else by its type ("string").
std::string shown(const Json& value);

// object[key] as T, or `fallback` when the key is absent or null. A value of another type, or a number outside T's
// range, is an error that names `key`. T: bool, int64_t, double, std::string.
template <typename T>
absl::StatusOr<T> json_value(const Json& object, const std::string& key, const T& fallback);

}  // namespace parvl
