// Reads the fields of a request's JSON. Every error is an answer's status (api_error.h): 400 with `param` naming the
// field. Null counts as absent.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "parvl/base/ids.h"
#include "parvl/base/json.h"
#include "parvl/base/status.h"
#include "parvl/serve/api_error.h"

namespace parvl {

// The body as a JSON object, refused before it is built when it would be huge. `needs` is what an empty one lacks.
absl::StatusOr<Json> parse_body(std::string_view text, const std::string& needs);

absl::Status wrong_type(const std::string& field, const std::string& wanted, const Json& value);
// `what` reads "tool calling is".
absl::Status unavailable(const std::string& field, const std::string& what);

// The field's value, or nullptr when it is absent or null.
const Json* find_field(const Json& object, const char* field);

// Overwrites `out` when the field is there.
template <typename T>
absl::Status read_field(const Json& body, const char* field, T& out) {
  absl::StatusOr<T> value = json_value<T>(body, field, out);
  if (!value.ok()) return with_field(value.status(), field);
  out = *value;
  return absl::OkStatus();
}

// The same for a whole number that must lie between `low` and `high`.
absl::Status read_count(const Json& body, const char* field, int64_t low, int64_t high, int64_t& out);

// Appends; the ids are only checked to fit their type.
absl::Status read_token_ids(const Json& list, const char* field, std::vector<TokenId>& out);
// The same for ids that must be the model's.
absl::Status read_model_tokens(const Json& list, const char* field, int64_t vocab_size, std::vector<TokenId>& out);

}  // namespace parvl
